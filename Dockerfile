# symmerge on a processor: docker build -t symmerge .
# docker run --rm -v "$PWD:/work" symmerge merge seed-0 seed-1 --out merged
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
# TORCH_INDEX: an index with builds for the processor only; they are smaller by gigabytes
ARG TORCH_INDEX=
WORKDIR /src
RUN python -m venv /opt/symmerge
ENV PATH=/opt/symmerge/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt ./
RUN pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install -c constraints.txt .

FROM python:${PYTHON}-slim
COPY --from=build /opt/symmerge /opt/symmerge
ENV PATH=/opt/symmerge/bin:$PATH HOME=/tmp
RUN useradd --create-home symmerge && mkdir /work && chown symmerge /work
USER symmerge
WORKDIR /work
ENTRYPOINT ["symmerge"]
CMD ["--help"]
