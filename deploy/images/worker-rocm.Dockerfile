# A worker that computes on AMD's Instinct GPUs, with AITER compiled ahead for MI300 (gfx942) and MI350 (gfx950).
#
# THIS IMAGE HAS NEVER BEEN BUILT OR RUN by its authors: there was no container engine, no ROCm and no AMD GPU to do it with. What AITER's kernels
# are proved by is in docs/aiter.md. The steps that build AITER are those of its makers' own images of this base.
#
#   docker build -f deploy/images/worker-rocm.Dockerfile -t tessera-worker-rocm:0.1.0 .        (hours; 64 GB of memory or more, else MAX_JOBS=8)
#   docker run --device /dev/kfd --device /dev/dri --group-add video --group-add render --shm-size 16g ... worker --model MODEL
#
# The root filesystem may be read-only; AITER and Triton compile what is missing at the first use, into /var/cache/tessera, and AITER writes to /tmp:
# both must be writable by user 10001. A volume at the first makes the second start fast.

FROM rocm/pytorch:rocm7.2.4_ubuntu24.04_py3.12_pytorch_release_2.10.0@sha256:4449f856653602317e4101a76fce599c7fcd58ccec2e539951fce5f73083179e AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The base's own environment, which has torch for ROCm, and its Triton.
ENV PATH=/opt/venv/bin:/opt/rocm/bin:/usr/local/bin:/usr/bin:/bin AITER_USE_SYSTEM_TRITON=1
# AITER's modules meet at run time, and those that are compiled there must be of the same pybind11. The other is what AITER is installed with.
# What the base's packages lack by themselves is no fault of what comes to them.
RUN pip install pybind11==3.0.4 setuptools_scm==8.3.1 && { pip check > /opt/base-lacks.txt || true; }

FROM base AS aiter
# The commit that this service's calls are checked against: tests/aiter/signatures/head.json.
ARG AITER_COMMIT=e4048607a535ace3a2b51ded31b1c8c2d45c0879
ARG MAX_JOBS
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/aiter
RUN git init --quiet . && git fetch --depth 1 https://github.com/ROCm/aiter.git "$AITER_COMMIT" && git checkout --quiet FETCH_HEAD \
    && git submodule update --init --recursive --depth 1
RUN pip install --requirement requirements.txt
# AITER looks for compiled modules in AITER_JIT_DIR, and among Python's other modules after that.
RUN AITER_JIT_DIR=/opt/tessera/aiter-jit PREBUILD_KERNELS=1 GPU_ARCHS="gfx942;gfx950" python setup.py develop \
    && rm -rf /opt/tessera/aiter-jit/build .git

FROM base AS worker
LABEL org.opencontainers.image.title="tessera-worker-rocm" \
      org.opencontainers.image.description="Model worker of Tessera for AMD Instinct GPUs, gfx942 and gfx950" \
      org.opencontainers.image.version="0.1.0"
WORKDIR /src
COPY deploy/images/worker.txt ./
# Not the packages that the base has with its torch.
RUN grep --invert-match --extended-regexp '^(numpy|setuptools)==' worker.txt > missing.txt && pip install --no-deps --requirement missing.txt
COPY --from=aiter /opt/aiter /opt/aiter
COPY --from=aiter /opt/tessera/aiter-jit /opt/tessera/aiter-jit
# AITER pins little: what it shares with us stays as it is.
RUN pip install --constraint missing.txt --requirement /opt/aiter/requirements.txt \
    && SETUPTOOLS_SCM_PRETEND_VERSION=0.1.9 pip install --constraint missing.txt --no-build-isolation --editable /opt/aiter
COPY pyproject.toml ./
COPY protos protos
COPY gateway gateway
COPY kv_manager kv_manager
COPY model_worker model_worker
COPY services services
RUN pip install --no-deps ./protos . && install --directory --owner 10001 --group 10001 /var/cache/tessera
RUN pip check > lacks.txt || ! grep --invert-match --line-regexp --fixed-strings --file /opt/base-lacks.txt lacks.txt
WORKDIR /
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/opt/tessera/aiter-jit HOME=/var/cache/tessera \
    AITER_JIT_DIR=/var/cache/tessera/aiter TRITON_CACHE_DIR=/var/cache/tessera/triton
ENV TESSERA_WORKER_LISTEN=0.0.0.0:50053 TESSERA_HEALTH_ADDRESS=127.0.0.1:50053
USER 10001:10001
EXPOSE 50053
# It answers while it loads its model; whether it has loaded is --service tessera.worker.v1.WorkerService.
HEALTHCHECK --interval=15s --timeout=5s --start-period=600s CMD ["tessera", "health"]
# The role is process 1 itself, and hears SIGTERM: its requests go to other workers, then it ends.
ENTRYPOINT ["tessera"]
CMD ["worker"]
