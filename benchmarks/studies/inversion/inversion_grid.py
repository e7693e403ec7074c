"""Reconstructions of several runs side by side, as in DFFKE's Figure 6: original | no noise | epsilon 1 | ... | noise.

    python benchmarks/studies/inversion/inversion_grid.py RUN... --attack decoder --out inversion.png [--json FILE]
    python benchmarks/studies/inversion/inversion_grid.py FILE          # the table of what --json kept

A RUN is a run folder, or a folder with runs below it. They have to be runs on the same records (same data setting and
seed), attacked before. Prints a table of what the attack reached under each noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from fedaudit.attack.pictures import draw, read
from fedaudit.errors import FedauditError, RunError
from fedaudit.runtime.attack_result import ReconstructionResult, ReconstructionScores
from fedaudit.runtime.run_record import RunRecord, read_record


def noise_of(record: RunRecord, kind: str) -> tuple[tuple[int, float], str]:
    """What the noise on a kind of release is called, and its place in the order: none, large to small epsilon, pure."""
    policy = record.setting.privacy.get(kind)
    if not policy:
        return (0, 0.0), "no noise"
    if policy.get("mechanism") == "pure-noise":
        return (2, 0.0), "pure noise"
    if policy.get("epsilon") is None:
        return (1, float(policy["noise_multiplier"])), f"multiplier {policy['noise_multiplier']:g}"
    clipped = str(policy.get("sensitivity", "clip:1")).startswith("clip")
    name = f"epsilon {policy['epsilon']:g}" + (", clipped" if clipped else "")
    return (3 if clipped else 1, -float(policy["epsilon"])), name


def found(folders: list[Path], attack: str, threat: str, kind: str) -> list[tuple[str, Path, ReconstructionResult]]:
    """Name of the noise, run folder and attack result of every run, in order."""
    rows = []
    for folder in folders:
        runs = [folder] if (folder / "record.json").exists() else sorted(p.parent for p in folder.rglob("record.json"))
        for run in runs:
            record = read_record(run)
            for result in record.attacks:
                asked = (result.attack, result.threat) == (attack, threat)
                if asked and isinstance(result, ReconstructionResult):
                    order, name = noise_of(record, kind)
                    rows.append((order, name, run, result))
    if not rows:
        raise RunError(f"No run was attacked with {attack} by the {threat}: fedaudit attack RUN --attack {attack}.")
    return [(name, run, result) for _, name, run, result in sorted(rows, key=lambda row: row[0])]


Row = dict[str, Any]  # a run's noise, what the attack reached, or a baseline of the first run


def kept(rows: list[tuple[str, Path, ReconstructionResult]]) -> list[Row]:
    """The table's figures, small enough to be kept with the page."""

    def scores(of: ReconstructionScores) -> Row:
        return {"identification": of.identification.model_dump()} | {
            name: getattr(of, name).model_dump() for name in ("mse", "psnr", "ssim", "cosine")
        }

    made: list[Row] = [
        {"noise": name, "verdict": "succeeded" if found.beats_baselines else "failed", **scores(found.pooled)}
        for name, _, found in rows
    ]
    first, _, found = rows[0]
    return made + [
        {"noise": f"baseline: {name.replace('_', ' ')} (of {first})", "verdict": "", **scores(of)}
        for name, of in found.baselines.items()
    ]


def table(rows: list[Row]) -> str:
    lines = [
        "| noise | identified | chance | MSE | PSNR, dB | SSIM | cosine | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]

    for row in rows:
        rate = row["identification"]
        cells = [f"{rate['value']:.1%} [{rate['low']:.1%}, {rate['high']:.1%}]", f"{rate['chance']:.1%}"]
        for name, digits in (("mse", 4), ("psnr", 1), ("ssim", 3), ("cosine", 3)):
            of = row[name]
            cells.append(f"{of['value']:.{digits}f} [{of['low']:.{digits}f}, {of['high']:.{digits}f}]")
        lines.append(f"| {row['noise']} | {' | '.join(cells)} | {row['verdict']} |")
    return "\n".join(lines)


def grid(rows: list[tuple[str, Path, ReconstructionResult]], out: Path) -> None:
    columns: dict[str, torch.Tensor] = {}
    titles: list[str] = []
    for name, run, result in rows:
        saved = read((run / result.picture).with_suffix(".safetensors"))
        if not columns:
            columns["original"] = saved["originals"]
            titles = [str(label) for label in saved["label"].tolist()]
        elif not torch.equal(columns["original"], saved["originals"]):
            raise RunError(f"{run} shows other records than {rows[0][1]}: give runs of one data setting and seed.")
        columns[name] = saved["images"]
    draw(columns, out, titles=titles, upright=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, or folders with runs below them")
    parser.add_argument("--attack", default="decoder", help="whose reconstructions (default: decoder)")
    parser.add_argument("--threat", default="server", help="of which threat (default: server)")
    parser.add_argument("--kind", default="embeddings", help="the release whose noise names a column")
    parser.add_argument("--out", type=Path, default=Path("inversion.png"), help="the picture")
    parser.add_argument("--json", type=Path, help="keep the table's figures in this file")
    options = parser.parse_args()
    if options.runs[0].is_file():
        print(table(json.loads(options.runs[0].read_text())))
        return
    try:
        rows = found(options.runs, options.attack, options.threat, options.kind)
        grid(rows, options.out)
        figures = kept(rows)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
        print(table(figures))
    except FedauditError as e:
        sys.exit(str(e))
    print(options.out)


if __name__ == "__main__":
    main()
