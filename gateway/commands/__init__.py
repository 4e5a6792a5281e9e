"""Bodies of the `tollhouse` commands; `gateway/cli.py` declares them and imports these only when called."""
