"""Bad input is refused before any step: one line with cause and mend, exit code 2 or 64, and nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from supervised import Home, new_home
from tandem.cli.app import main
from tandem.db.embedded import embedded_database
from tandem.db.engine import connect, open_connection, parse
from tandem.db.queries import list_runs, load_run
from tandem.ids import new_run_id
from tandem.spec import RunSpec
from tandem.supervisor import check_inputs
from tandem.worker_io import Checked
from tiny_tokenizers import byte_level_json

Refused = Callable[..., str]
UNUSED_PORT = 9
"""Of the discard service, which nobody runs."""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Home, str]]:
    """A data folder whose database is up for all tests."""
    with new_home() as home, embedded_database(home=home.folder) as url:
        yield home, url


@pytest.fixture
def refused(
    server: tuple[Home, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Refused:
    """Runs `tandem run` in this process; gives its one error line. No row and no file may be left."""
    home, url = server
    for name, value in home.environment.items():
        monkeypatch.setenv(name, value)
    for name in set(os.environ) - set(home.environment):
        monkeypatch.delenv(name)

    def run(*arguments: object, code: int, runs: int = 0) -> str:
        with pytest.raises(SystemExit) as end:
            main(["run", *map(str, arguments)])
        out, err = capfd.readouterr()
        *before, line = err.splitlines()
        assert (end.value.code, out) == (code, ""), f"{end.value.code} {out} {err}"
        assert line.startswith("error: ")
        assert not before or runs, f"not one line: {err}"
        engine = connect(url)
        assert len(list_runs(engine)) == runs
        engine.dispose()
        assert home.spooled() == []
        return line

    return run


# -- the spec ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gpt-5"], "unknown preset 'gpt-5': choose one of tiny"),
        (["--model", "../presets/tiny"], "unknown preset"),
        (["--tp", "3"], "tp 3 does not divide the KV heads (4) of tiny: use --tp 1 or 2 or 4"),
        (["--tp", "0"], "greater than 0"),
        (["--steps", "0"], "greater than 0"),
        (["--steps", "many"], "--steps"),
        (["--sync", "never"], "sync"),
        (["--sync", "none"], "compares nothing"),
        (["--workload", "alignment"], "workload"),
        (["--seed", "-1"], "seed"),
        (["--window", "0"], "window"),
        (["--run-id", "7"], "is no UUID"),
        (["--no-such-flag"], "no-such-flag"),
        (["missing.yaml"], "missing.yaml"),
    ],
)
def test_a_wrong_field_is_wrong_usage(refused: Refused, arguments: list[str], says: str):
    assert says in refused(*arguments, code=64)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("steps: [1", "not valid YAML"),
        ("- steps", "must be a mapping"),
        ("stepz: 3", "stepz"),
        ("steps: 3\nduration: -1", "duration"),
        ("optimizer: {learning_rate: -1}", "learning_rate"),
        ("a: &a [*a, *a]", "a"),
    ],
)
def test_a_wrong_spec_file_is_wrong_usage(refused: Refused, tmp_path: Path, text: str, says: str):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    assert says in refused(path, code=64)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name = "x', "not valid TOML"),
        ('name = "x"', "fault"),
        ('name = "x"\n[[fault]]\nkind = "melt"\nrate = 0.1', "kind"),
        ('name = "x"\n[[fault]]\nkind = "flip"', "give rate"),
        ('name = "x"\n[[fault]]\nkind = "flip"\nrate = 2.0', "rate"),
        ('name = "x"\n[[fault]]\nkind = "flip"\nrate = 0.1\nlayers = 7', "no site of this model is selected"),
        ('name = "x"\n[[fault]]\nkind = "flip"\nrate = 0.1\nranks = 5', "none of its ranks"),
        ('name = "x"\n[[fault]]\nkind = "flip"\nlevel = "state"\nelements = 1\ninput = "w"', "an input 'w'"),
        ("\xff", "fault profile"),
    ],
)
def test_a_malformed_fault_profile_is_wrong_usage(refused: Refused, tmp_path: Path, text: str, says: str):
    path = tmp_path / "faults.toml"
    path.write_bytes(text.encode("latin-1"))
    assert says in refused("--fault", path, code=64)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"text\0more" * 100, "is binary"),
        (b"short", "too few"),
        (None, "is missing"),
    ],
)
def test_data_that_cannot_be_used_is_refused(refused: Refused, tmp_path: Path, content: bytes | None, says: str):
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_bytes(content)
    assert says in refused("--data", path, code=2)


def test_a_tokenizer_that_is_none_is_refused(refused: Refused, tmp_path: Path):
    (tmp_path / "data.txt").write_text("some text " * 100)
    (tmp_path / "tokenizer.json").write_text('{"model": 7}')
    message = refused("--data", tmp_path / "data.txt", "--tokenizer", tmp_path / "tokenizer.json", code=2)
    assert "is no tokenizer.json" in message


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b'{"id": "b", "context": "", "question": "?", "choices": ["1", "2"]}', "missing required field `answer`"),
        (b'{"id": "b", "context": "", "question": "?", "choices": ["1", "2"], "answer": 2}', "answer 2 is out"),
        (b'{"id": "a", "context": "", "question": "?", "choices": ["1", "2"], "answer": 0}', "is already that of"),
        ('{"id": "b", "context": "", "question": "é"}'.encode("latin-1"), "no UTF-8"),
        (b'{"id": "b", "context": "", "question": "?", "choices": ["1"], "answer": 0}', "1 choice"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused_with_file_and_line(
    refused: Refused, tmp_path: Path, bad: bytes, says: str
):
    """No run is stored, so none was begun and no worker started."""
    path = tmp_path / "quiz.jsonl"
    path.write_bytes(b'{"id": "a", "context": "", "question": "?", "choices": ["1", "2"], "answer": 0}\n' + bad + b"\n")
    message = refused("--workload", "finetune", "--questions", path, code=2)
    assert message.startswith(f"error: {path}:2: ")
    assert says in message


# -- weights -----------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 256,
}  # fmt: skip


def write_weights(folder: Path) -> Path:
    """A whole little Llama as Hugging Face stores it."""
    shapes = {
        "model.embed_tokens.weight": (256, 32), "model.norm.weight": (32,), "lm_head.weight": (256, 32),
        "model.layers.0.input_layernorm.weight": (32,), "model.layers.0.post_attention_layernorm.weight": (32,),
        "model.layers.0.self_attn.q_proj.weight": (32, 32), "model.layers.0.self_attn.k_proj.weight": (16, 32),
        "model.layers.0.self_attn.v_proj.weight": (16, 32), "model.layers.0.self_attn.o_proj.weight": (32, 32),
        "model.layers.0.mlp.gate_proj.weight": (64, 32), "model.layers.0.mlp.up_proj.weight": (64, 32),
        "model.layers.0.mlp.down_proj.weight": (32, 64),
    }  # fmt: skip
    folder.mkdir()
    rng = np.random.default_rng(0)
    save_file({n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def _bad_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(8)
        file.write(b"\xff" * 64)


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: rewrite(d, lambda t: t.pop(Q)), f"{Q} is missing"),
        (lambda d: rewrite(d, lambda t: t.update({"model.extra": t[Q]})), "model.extra is unexpected"),
        (lambda d: rewrite(d, lambda t: t.update({Q: t[Q][:16].copy()})), "has shape [16, 32]"),
        (lambda d: rewrite(d, lambda t: t.update({Q: t[Q].astype(np.float64)})), "has dtype F64"),
        (_cut, "no whole safetensors file"),
        (_bad_header, "no whole safetensors file"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "no whole safetensors file"),
        (lambda d: (d / "model.safetensors").unlink(), "is missing"),
        (lambda d: (d / "config.json").unlink(), "is missing"),
        (lambda d: (d / "config.json").write_text("{"), "is no JSON"),
        (lambda d: (d / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["GPT2"]})), "not supported"),
        (lambda d: (d / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": -1})), "hidden"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    refused: Refused, tmp_path: Path, damage: Callable[[Path], object], says: str
):
    folder = write_weights(tmp_path / "model")
    damage(folder)
    assert says in refused("--weights", folder, "--model", "tiny", code=2)


def test_another_models_tokenizer_is_refused(refused: Refused, tmp_path: Path):
    weights, tokenizer = write_weights(tmp_path / "weights"), byte_level_json(tmp_path)
    message = refused("--weights", weights, "--model", "tiny", "--tp", "2", "--tokenizer", tokenizer, code=2)
    assert f"{tokenizer} has 400 tokens, the weights have 256: give the tokenizer" in message


def test_tp_must_divide_what_the_weights_config_says(refused: Refused, tmp_path: Path):
    folder = write_weights(tmp_path / "model")
    says = refused("--weights", folder, "--model", "tiny", "--tp", "4", code=64)
    assert "tp 4 does not divide the KV heads (2)" in says


def test_weights_of_no_presets_model_need_one_for_the_training_shape(refused: Refused, tmp_path: Path):
    """Whatever is then given, the run says which model it ran."""
    folder = write_weights(tmp_path / "model")
    assert "no preset has this model (llama-1l-32)" in refused("--weights", folder, code=64)
    assert check_inputs(RunSpec(weights=folder, model="small")) == Checked("small", "llama-1l-32 (shape of small)")


# -- the database ------------------------------------------------------------------------------------


class OldServer:
    """The real server behind a TCP port that answers `SHOW server_version_num` with another version."""

    def __init__(self, folder: str, real: bytes, told: bytes) -> None:
        assert len(real) == len(told)
        self._folder, self._real, self._told = folder, real, told
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            database = socket.socket(socket.AF_UNIX)
            database.connect(f"{self._folder}/.s.PGSQL.5432")
            threading.Thread(target=self._copy, args=(client, database, False), daemon=True).start()
            threading.Thread(target=self._copy, args=(database, client, True), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with source:
            while True:
                try:
                    data = source.recv(65536)
                    if not data:
                        target.shutdown(socket.SHUT_RDWR)
                        return
                    target.sendall(data.replace(self._real, self._told) if answers else data)
                except OSError:
                    return


def test_a_server_that_is_too_old_is_refused(refused: Refused, server: tuple[Home, str]):
    _, url = server
    with open_connection(url) as conn:
        row = conn.execute("SHOW server_version_num").fetchone()
    assert row is not None
    old = OldServer(str(parse(url).query["host"]), str(row[0]).encode(), b"140012")
    try:
        message = refused("--db", f"postgresql://tandem@127.0.0.1:{old.port}/tandem?sslmode=disable", code=2)
    finally:
        old.close()
    assert "the database is PostgreSQL 14, Tandem needs 16 or newer: upgrade the server" in message


@pytest.mark.parametrize(
    ("database", "says"),
    [
        (f"postgresql://tandem:secret@127.0.0.1:{UNUSED_PORT}/tandem", "cannot be used"),
        ("postgresql://tandem@no-such-host.invalid/tandem", "cannot be used"),
        ("mysql://tandem@127.0.0.1/tandem", "give a postgresql:// URL"),
        ("nonsense", "cannot be read"),
    ],
)
def test_a_database_that_cannot_be_reached_is_refused(refused: Refused, database: str, says: str):
    message = refused("--db", database, code=2)
    assert says in message
    assert "secret" not in message


def test_a_database_without_the_schema_is_refused(refused: Refused, server: tuple[Home, str]):
    _, url = server
    with open_connection(url) as conn:
        conn.autocommit = True
        conn.execute("CREATE DATABASE bare")
    bare = parse(url).set(drivername="postgresql", database="bare").render_as_string(False)
    assert "has no Tandem schema: run `tandem db upgrade`" in refused("--db", bare, code=2)


# -- the machine -------------------------------------------------------------------------------------


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes, in this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_spool_that_cannot_grow_is_refused(refused: Refused):
    with file_size_limit(1 << 20):
        message = refused(code=2)
    assert "the spool in" in message
    assert "cannot be written (File too large): free 4 MiB there, or set TANDEM_HOME to another disk" in message


@pytest.mark.needs("mount")
def test_a_full_disk_under_the_spool_is_refused(refused: Refused, server: tuple[Home, str]):
    home, _ = server
    spool = home.folder / "spool"
    spool.mkdir(exist_ok=True)
    with ExitStack() as stack:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", spool], check=True)
        stack.callback(subprocess.run, ["umount", spool], check=True)
        assert "cannot be written (No space left on device)" in refused(code=2)


def test_a_spool_that_is_no_folder_is_refused(refused: Refused, server: tuple[Home, str]):
    home, _ = server
    spool = home.folder / "spool"
    if spool.exists():
        spool.rmdir()
    spool.symlink_to("/proc/version")
    try:
        assert "the spool in" in refused(code=2)
    finally:
        spool.unlink()


def test_an_id_that_is_no_uuid7_is_refused(refused: Refused):
    assert "is not a UUIDv7" in refused("--run-id", "12345678-1234-4234-8234-123456789abc", code=2)


def test_devices_that_do_not_suffice_leave_a_closed_run(
    refused: Refused, server: tuple[Home, str], monkeypatch: pytest.MonkeyPatch
):
    """Only a worker can know. The run is then stored, closed and inconclusive; and its id is taken."""
    _, url = server
    run_id = new_run_id(1_790_000_000.0, os.urandom(10))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    assert "devices" in refused("--run-id", run_id, code=2, runs=1)
    engine = connect(url)
    records = load_run(engine, run_id)
    engine.dispose()
    assert (records.run.state, records.run.verdict, records.steps) == ("finished", "inconclusive", [])
    [attempt] = records.attempts
    assert attempt.state == "orphaned"
    assert attempt.reason == records.run.reason == "setup"
    again = refused("--run-id", run_id, code=2, runs=1)
    assert f"run {run_id} exists already: leave the id out to get a new one" in again
