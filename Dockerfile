# A supervisor in a container, with the packages that the hosts of a slice have; see docs/supervise.md.
FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir --no-deps --require-hashes -r /src/src/lmwright/cloud/hosts.lock \
    && pip install --no-cache-dir --no-deps /src
ENTRYPOINT ["lmwright", "jobs", "follow"]
