"""The digest is of the tensor that a program returns, not of a recomputed copy: read from the optimised HLO."""

from __future__ import annotations

import re

import pytest

from tandem.spec import ModelConfig, Training
from tandem_worker.model.build import make_mesh
from tandem_worker.model.compile import compile_program, injected
from tandem_worker.model.plan import make_plan
from tandem_worker.model.programs import bodies, example_ops

MODEL = ModelConfig(name="hlo", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=64)
TIED = MODEL.model_copy(update={"tied": True})
PROGRAMS = tuple(example_ops(make_plan(MODEL, Training(), 2)))
TRANSPARENT = {"bitcast", "tuple", "get-tuple-element"}
_LINE = re.compile(r"^\s*(ROOT )?%(\S+) = (?:\(.*?\)|\S+) ([a-z][a-z0-9-]*)\((.*?)\)(?:, |$)")


class Entry:
    """The entry computation of an optimised module: opcode and operands per instruction."""

    def __init__(self, text: str) -> None:
        self.instructions: dict[str, tuple[str, list[str]]] = {}
        self.root = ""
        for line in text[text.index("\nENTRY ") :].splitlines()[2:]:
            if (found := _LINE.match(line)) is None:
                continue
            root, name, opcode, operands = found.groups()
            self.instructions[name] = (opcode, re.findall(r"%([\w.\-]+)", operands))
            self.root = name if root else self.root

    def resolve(self, name: str) -> str:
        """The instruction behind bitcasts."""
        opcode, operands = self.instructions[name]
        return self.resolve(operands[0]) if opcode == "bitcast" else name

    def sources(self, name: str, stop: set[str]) -> tuple[set[str], set[str]]:
        """(instructions of ``stop`` reached, parameters reached) from ``name`` backwards, not passing ``stop``."""
        reached, parameters, seen, todo = set(), set(), set(), [name]
        while todo:
            at = self.resolve(todo.pop())
            if at in seen:
                continue
            seen.add(at)
            opcode, operands = self.instructions[at]
            if at in stop:
                reached.add(at)
            elif opcode == "parameter":
                parameters.add(at)
            elif opcode == "conditional":
                todo.extend(operands[1:])  # not its predicate, which says only that the branch is taken
            else:
                todo.extend(operands)
        return reached, parameters


def check(text: str, outputs: int) -> None:
    entry = Entry(text)
    opcode, returned = entry.instructions[entry.root]
    assert opcode == "tuple"
    tensors = {entry.resolve(name) for name in returned[:outputs]}
    reached, parameters = entry.sources(returned[outputs], tensors)
    assert not parameters, f"the digest is computed from {sorted(parameters)}, past the outputs {sorted(tensors)}"
    assert reached == tensors


@pytest.mark.parametrize(
    "synthetic", [pytest.param(False, id="real"), pytest.param(True, id="synthetic", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_digest_reads_the_returned_tensor(name: str, synthetic: bool) -> None:
    model = TIED if name in ("embed.update", "head.bwd") and synthetic else MODEL
    check(*compiled(name, model, 2, synthetic=synthetic))


@pytest.mark.parametrize("name", ["attn.update", "ffn.bwd", "grad_norm"])
def test_so_it_does_where_there_is_one_rank(name: str) -> None:
    """There the compiler knows every rank's number, and folds what depends on it."""
    check(*compiled(name, MODEL, 1, synthetic=False))


def compiled(name: str, model: ModelConfig, ranks: int, *, synthetic: bool) -> tuple[str, int]:
    """Optimised text of a program, and how many outputs it has."""
    training = Training(sequence=16)
    plan = make_plan(model, training, ranks)
    op = example_ops(plan)[name]
    inputs, outputs = ([plan.slots[s] for s in slots] for slots in (op.inputs, op.outputs))
    compute = injected(name, bodies(plan, model, training)[name], outputs)
    program = compile_program(name, compute, inputs, make_mesh(ranks), len(outputs) + 1 if synthetic else 0)
    return program.compiled.as_text(), len(outputs)


def test_checker_sees_a_recomputed_copy() -> None:
    text = """
ENTRY %main (p: f32[4]) -> (f32[4], u32[2]) {
  %p = f32[4]{0} parameter(0)
  %a = f32[4]{0} fusion(%p), kind=kLoop, calls=%f
  %b = u32[2]{0} fusion(%p), kind=kLoop, calls=%g
  ROOT %t = (f32[4]{0}, u32[2]{0}) tuple(%a, %b)
}
"""
    with pytest.raises(AssertionError, match="computed from"):
        check(text, 1)
