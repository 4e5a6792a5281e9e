# Builds the gateway and nothing else: locked wheels in, a virtual environment out, no build tools in the result.
# With docker or podman: docker build -t tollhouse .

FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
RUN python -m venv /opt/tollhouse
# The lock before the code, so that a change of code does not fetch anything again.
COPY requirements.lock ./
RUN /opt/tollhouse/bin/python -m pip install --no-deps --require-hashes --only-binary :all: -r requirements.lock
COPY pyproject.toml README.md ./
COPY gateway gateway
COPY config config
COPY migrations migrations
RUN /opt/tollhouse/bin/python -m pip install --no-deps --no-index --no-build-isolation .
# The build backend and pip have done their work. A .pth file would run code at every start of Python, which is how
# a stolen release of a dependency once spread: there must be none left.
RUN /opt/tollhouse/bin/python -m pip uninstall --yes hatchling editables trove-classifiers setuptools pip \
  && pth="$(find /opt/tollhouse -name '*.pth')" \
  && if [ -n "$pth" ]; then echo "unexpected start hooks: $pth" >&2; exit 1; fi

FROM python:3.11-slim-bookworm
RUN groupadd --system --gid 10001 tollhouse \
  && useradd --system --uid 10001 --gid 10001 --home-dir /var/lib/tollhouse --no-create-home --shell /usr/sbin/nologin tollhouse \
  && install -d -o tollhouse -g tollhouse -m 0700 /var/lib/tollhouse
COPY --from=build /opt/tollhouse /opt/tollhouse
ENV PATH=/opt/tollhouse/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOLLHOUSE_STATE_DIR=/var/lib/tollhouse
# The only place that is written to; everything else may be mounted read-only.
VOLUME /var/lib/tollhouse
WORKDIR /var/lib/tollhouse
USER 10001:10001
EXPOSE 4000 4001
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:4000/livez', timeout=2)"]
ENTRYPOINT ["tollhouse"]
CMD ["serve", "--host", "0.0.0.0"]
