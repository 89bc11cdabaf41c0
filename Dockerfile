# A policy server. The host is public inside the container, so it needs a token:
#
#   docker build -t qfleet .
#   docker run -p 8000:8000 -e QFLEET_TOKEN=SECRET -v "$PWD/runs/NAME:/models/run:ro" qfleet run
#
# For GPUs (the wheels bring CUDA along; the host needs NVIDIA's container toolkit):
#
#   docker build -t qfleet:cuda --build-arg "TORCH=torch --index-url https://download.pytorch.org/whl/cu128" .
#   docker run --gpus all … qfleet:cuda run --device cuda
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY qfleet ./qfleet
RUN pip install --no-cache-dir ${TORCH}
RUN pip install --no-cache-dir ".[serve,export]"
RUN useradd --create-home qfleet
USER qfleet
WORKDIR /models
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/readyz', timeout=5)"]
ENTRYPOINT ["qfleet", "serve", "--host", "0.0.0.0"]
CMD ["policy.safetensors"]
