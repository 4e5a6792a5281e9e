"""Which replica of a self-hosted deployment gets a request: the one that holds its prefix, unless it is saturated.

`chain` makes a prompt comparable, `index` remembers what a replica holds, `fleet` decides, `scrape` reads metrics.
"""
