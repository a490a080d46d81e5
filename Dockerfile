# Two images, each without what the other needs:
#
#   docker build --target proxy .    the OpenAI API and routing; no torch
#   docker build --target node .     prefill and decode nodes
#
# Both run `tandem` as a user of their own and keep models in /var/lib/tandem, which is meant to be a volume.

ARG BASE_IMAGE=python:3.11-slim

# --- environments: the large layers follow the lists of pyproject.toml alone ------------------------------------------

FROM ${BASE_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PATH=/opt/tandem/bin:$PATH PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
RUN python3 -m venv /opt/tandem && pip uninstall --quiet --yes setuptools
COPY pyproject.toml deploy/requirements.py deploy/torch_source.py ./

# Byte code only of what a proxy imports at its start, and no sources and tests of libraries: a tenth of the image.
FROM build AS build-proxy
RUN --mount=type=cache,target=/var/cache/pip \
    python requirements.py proxy >list.txt && pip install --quiet --no-compile --requirement list.txt && \
    find /opt/tandem \( -type d -name tests -o -name '*.py[ix]' -o -name '*.pxd' -o -name '*.h' \) -prune -exec rm -r {} +
RUN --mount=type=cache,target=/var/cache/pip --mount=type=bind,target=/source,rw \
    pip install --quiet --no-compile --no-deps . && tandem proxy --help >/dev/null && tandem models >/dev/null && \
    find /opt/tandem/lib/*/site-packages/pip -name __pycache__ -prune -exec rm -r {} +

# torch first, and by itself: for a CPU from deploy/wheels if it is there, else from TORCH_INDEX, meant for PyTorch's own index
# of CPU wheels (its installation page names it). Without either it is the package index's, on x86-64 with gigabytes of CUDA.
FROM build AS build-node
ARG TORCH_INDEX
ARG EXTRAS=engine
RUN --mount=type=cache,target=/var/cache/pip --mount=type=bind,source=deploy/wheels,target=/wheels \
    python requirements.py $EXTRAS >list.txt && grep '^torch\b' list.txt >torch.txt && \
    pip install --quiet --no-deps $(python torch_source.py /wheels "$TORCH_INDEX" $EXTRAS) --requirement torch.txt
RUN --mount=type=cache,target=/var/cache/pip pip install --quiet --requirement list.txt
# for the CPU kernels, minutes of compiling, which ccache saves as long as they stay as they are; Python's headers too, where
# the base image keeps them in a package of their own
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ ccache \
    $(python3 -c "import os, sysconfig as s; print('' if os.path.exists(s.get_path('include') + '/Python.h') else 'python3-dev')")
RUN --mount=type=cache,target=/var/cache/pip --mount=type=cache,target=/var/cache/ccache --mount=type=bind,target=/source,rw \
    CC="ccache gcc" CXX="ccache g++" CCACHE_DIR=/var/cache/ccache pip install --quiet --no-deps . && python -P -c 'import kernels.cpu._native'

# --- what runs --------------------------------------------------------------------------------------------------------

FROM ${BASE_IMAGE} AS runtime
LABEL org.opencontainers.image.title=tandem
RUN useradd --uid 10001 --home-dir /var/lib/tandem --create-home tandem && \
    mkdir /models /run/tandem && chown tandem:tandem /run/tandem
ENV PATH=/opt/tandem/bin:$PATH TANDEM_CACHE_DIR=/var/lib/tandem HF_HOME=/var/lib/tandem/huggingface \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY deploy/healthcheck.py /opt/healthcheck.py
WORKDIR /var/lib/tandem
USER tandem
ENTRYPOINT ["tandem"]

FROM runtime AS proxy
COPY --from=build-proxy /opt/tandem /opt/tandem
EXPOSE 8000 8100
CMD ["proxy"]

FROM runtime AS node
COPY --from=build-node /opt/tandem /opt/tandem
EXPOSE 8001 8002
CMD ["decode"]
