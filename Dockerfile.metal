# syntax=docker/dockerfile:1
# The Metal worker in a container: a Linux/arm64 guest whose GPU calls are forwarded to the Mac's Metal
# (llama.cpp's VirtGPU). builds/README.md says what the Mac needs; without it the worker refuses to start.
#   podman build --platform linux/arm64 -f Dockerfile.metal -t llorch-metal .   (or: make image-metal)
#   podman run --device /dev/dri -p 8080:8080 llorch-metal
ARG BASE_IMAGE=docker.io/library/debian:trixie-slim@sha256:a29215f6a35e51e22adffa17f89e9d2ef06214e64a2bad10d765c46aea49f11f

FROM ${BASE_IMAGE} AS chat
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates libstdc++6 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY builds/*.py builds/*.toml builds/
COPY builds/locks builds/locks
# Node comes as a package with a hash, and what it builds with from npm by the sources' own lock file.
RUN --mount=type=cache,target=/root/.cache python3 -m builds ui --out /chat

FROM ${BASE_IMAGE} AS build
# The base is pinned by its digest; versions of Debian's packages beside it would only disappear from
# the archive after the next security update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates g++ libdrm-dev pkg-config python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# The wheel first: it takes minutes and changes only with the pin.
COPY builds/*.py builds/*.toml builds/*.cmake builds/*.h builds/
COPY builds/locks builds/locks
RUN --mount=type=cache,target=/root/.cache python3 -m builds metal --out /wheels
COPY --from=chat /chat /wheels
COPY LICENSE README.md models.toml pyproject.toml ./
COPY worker worker
# The venv keeps its place in the final stage, so its scripts stay right. pip and the packages' own
# tests have no business there, nor have the symbols of uvloop and yaml (14 MB) that only a debugger reads.
RUN --mount=type=cache,target=/root/.cache \
    python3 -m builds install /opt/llorch /wheels/*.whl \
    && /opt/llorch/bin/pip uninstall --yes pip setuptools \
    && find /opt/llorch -depth -type d -name tests -exec rm -r {} + \
    && find /opt/llorch \( -path '*/uvloop/*.so' -o -path '*/yaml/*.so' \) -exec strip --strip-debug {} +

FROM ${BASE_IMAGE}
# libdrm2: the way to the virtual GPU. No Mesa: with it a software renderer could pose as the GPU.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates libdrm2 libgomp1 libstdc++6 python3 \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf \
    && useradd --uid 10001 --home-dir /cache --no-create-home --shell /usr/sbin/nologin llorch \
    && install --directory --owner=llorch --group=llorch /models \
    && install --directory --owner=llorch --group=llorch --mode=1777 /cache
COPY --from=build /opt/llorch /opt/llorch
# What is in this image, Debian's packages included, as CycloneDX.
RUN --mount=type=bind,from=build,source=/src,target=/src \
    cd /src && python3 -B -m builds sbom /opt/llorch > /opt/llorch/sbom.cdx.json
ARG VERSION=0.1.0
ARG SOURCE=unknown
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="llorch-metal" \
    org.opencontainers.image.description="One model on a Mac's GPU, served over HTTP from a container" \
    org.opencontainers.image.licenses="GPL-3.0-or-later" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.source="${SOURCE}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.created="${CREATED}"
# Inside a container only the published port is reachable, so it listens on every address.
# Nothing is written outside /cache, temporary files included: the root may be read-only.
ENV LLORCH_HOST=0.0.0.0 \
    LLORCH_CACHE_DIR=/cache \
    TMPDIR=/cache \
    PATH=/opt/llorch/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
# A models.toml in this folder takes the place of the one that ships.
WORKDIR /models
EXPOSE 8080
STOPSIGNAL SIGTERM
# /health answers without touching the engine; 503 means that the engine has stopped making progress.
HEALTHCHECK --interval=15s --timeout=10s --start-period=10s --retries=3 \
    CMD ["llorch-metal", "health"]
ENTRYPOINT ["llorch-metal"]
