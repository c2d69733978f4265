# The server of docs/serving.md on CPU; for GPUs install the extra cuda as well.
#   docker build -t dlm_jax . && docker run --rm -p 127.0.0.1:8000:8000 -e DLM_JAX_API_KEY dlm_jax
FROM python:3.12-slim

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY dlm_jax dlm_jax
COPY configs configs
RUN pip install --no-cache-dir '.[serve]' && useradd --create-home server
USER server
ENV JAX_COMPILATION_CACHE_DIR=/home/server/.cache/xla
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["dlm-serve", "--host", "0.0.0.0"]
CMD ["--port", "8000"]
