"""What synchronisation costs: one long-living pair whose steps take turns between the modes."""

from __future__ import annotations

from importlib.resources import as_file, files

from bench.options import Options
from bench.pair import Blocks, interleaved
from bench.results import Row, row
from bench.stats import quantile, ratios

DELAY_S = 0.002
MODES = ("none", "optimistic", "digest", "full")
PROFILE = "steady"


def clean(options: Options) -> list[Row]:
    """Steps without any corruption, and the bytes that they put on the link."""
    blocks = interleaved(options.spec(), MODES, options.blocks, options.seed)
    steps = [block["optimistic"] for block in blocks]
    bytes_ = [100 * step.link_bytes / step.full_bytes for step in steps]
    measured = [100 * block["optimistic"].link_bytes / block["full"].link_bytes for block in blocks]
    return [
        *_against_none(options, "sync", blocks, 1.03, delay_ms=0),
        row(
            "sync.link_bytes", "bytes on the link in an optimistic step / in full exchange, by the sizes of the sites",
            quantile(bytes_), options.setting(), unit="%", bound=0.1,
        ),
        row(
            "sync.link_bytes_measured", "the same / what a full step really moved", quantile(measured),
            options.setting(), unit="%",
        ),
        row(
            "sync.step", "one unsynchronised step of the pair",
            quantile([block["none"].duration_s for block in blocks]), options.setting(), unit="s",
        ),
    ]  # fmt: skip


def delayed(options: Options) -> list[Row]:
    """The same with a slower link."""
    blocks = interleaved(options.spec(), MODES, options.blocks, options.seed, link_delay_s=DELAY_S)
    return _against_none(options, "delay", blocks, 1.05, delay_ms=1000 * DELAY_S)


def corrupting(options: Options) -> list[Row]:
    """A suspect that corrupts as often as the paper's worst node, in every step."""
    with as_file(files("tandem").joinpath("fault_profiles", f"{PROFILE}.toml")) as path:
        spec = options.spec(fault=path, kind="suspect")
        blocks = interleaved(spec, ("optimistic", "full"), options.blocks, options.seed)
    seconds = [{mode: step.duration_s for mode, step in block.items()} for block in blocks]
    found = [sum(c.mismatched_sites for c in block["optimistic"].classes.values()) for block in blocks]
    setting = options.setting(
        fault=PROFILE, mismatching_sites_per_step=quantile([float(n) for n in found]).value, replays=spec.replays,
        replay_budget=spec.replay_budget,
    )  # fmt: skip
    if not all(found):
        raise RuntimeError(f"the suspect did not corrupt every step: {found} mismatching sites")
    return [
        row(
            "corrupt.optimistic", "a heavily corrupting suspect: optimistic step / full step",
            quantile(ratios(seconds, "optimistic", "full")), setting, bound=1.5,
        )
    ]  # fmt: skip


def _against_none(options: Options, bench: str, blocks: Blocks, bound: float, *, delay_ms: float) -> list[Row]:
    seconds = [{mode: step.duration_s for mode, step in block.items()} for block in blocks]
    slow = f", {delay_ms:g} ms of delay each way" if delay_ms else ""
    return [
        row(
            f"{bench}.{mode}", f"clean step, {mode} / unsynchronised{slow}",
            quantile(ratios(seconds, mode, "none")), options.setting(delay_ms=delay_ms),
            bound=bound if mode == "optimistic" else None,
        )
        for mode in MODES[1:]
    ]  # fmt: skip
