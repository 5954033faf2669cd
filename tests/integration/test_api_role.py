"""The API with the database role that its page describes: it may read, and write decisions about nodes, and no more."""

from __future__ import annotations

import os
import re
import urllib.request
from pathlib import Path

import psycopg
import pytest

from api_server import serving
from node_runs import BEGAN, HOUR, node_run, store_run
from tandem.db.engine import connect, open_connection, parse

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
READS = ("/v1/runs", "/v1/nodes", "/v1/nodes/sick", "/v1/nodes/sick/report", "/v1/nodes/sick/history")
OF_A_RUN = ("", "/summary", "/report", "/steps", "/mismatches", "/evaluations", "/export/mismatches?format=csv")
FORBIDDEN = (
    "DELETE FROM node_decisions", "UPDATE runs SET verdict = 'match'", "CREATE TABLE mine (x int)",
    "INSERT INTO alembic_version VALUES ('x')",
)  # fmt: skip


@pytest.fixture
def narrow(database_url: str) -> str:
    """Two runs of a corrupting node; from here on every session of the database has the page's role.

    The server of the tests knows its users by their account on this machine, so the role is taken, not logged in as.
    """
    engine = connect(database_url)
    store_run(engine, node_run(kind="null", suspect="well-1", reference="well-2"))
    store_run(engine, node_run(hits={3: 5}, began=BEGAN + HOUR))
    engine.dispose()
    (block,) = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    role = f"tandem_api_{os.urandom(4).hex()}"  # a role is the whole server's
    with open_connection(database_url) as conn:
        conn.execute(block.replace("tandem_api", role).replace("'...'", "'secret'"))
        conn.execute(f"ALTER DATABASE {parse(database_url).database} SET role = {role}")
        conn.commit()
    return role


def test_the_role_of_the_page_is_enough_and_writes_nothing_else(database_url: str, narrow: str) -> None:
    with serving(database_url) as api:
        assert api.client.get("/readyz").status_code == 200
        (run,) = [one["run"] for one in api.get("/v1/runs")["runs"] if one["suspect_node"] == "sick"]
        for path in (*READS, *(f"/v1/runs/{run}{rest}" for rest in OF_A_RUN)):
            answer = api.client.get(path)
            assert answer.status_code == 200, (path, answer.text[:300])
        before = api.get("/v1/nodes/sick")["verdict"]
        answer = api.client.post("/v1/nodes/sick/clear", json={"reason": "the board was replaced"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["verdict"] != before
        with urllib.request.urlopen(f"{api.url}/metrics") as told:
            assert "tandem_api_database_up 1.0" in told.read().decode()
    with open_connection(database_url) as conn:
        conn.autocommit = True
        assert conn.execute("SELECT current_user").fetchone() == (narrow,)
        for statement in FORBIDDEN:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(statement)
