"""Reconstructions of several runs side by side, as in DFFKE's Figure 6: original | no noise | epsilon 1 | ... | noise.

    python docs/results/inversion_grid.py RUN... --attack decoder --out inversion.png

A RUN is a run folder, or a folder with runs below it. They have to be runs on the same records (same data setting and
seed), attacked before. Prints a table of what the attack reached under each noise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

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


def table(rows: list[tuple[str, Path, ReconstructionResult]]) -> str:
    lines = [
        "| noise | identified | chance | MSE | PSNR, dB | SSIM | cosine | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def shown(of: ReconstructionScores) -> list[str]:
        rate = of.identification
        cells = [f"{rate.value:.1%} [{rate.low:.1%}, {rate.high:.1%}]", f"{rate.chance:.1%}"]
        for found, digits in ((of.mse, 4), (of.psnr, 1), (of.ssim, 3), (of.cosine, 3)):
            cells.append(f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]")
        return cells

    for name, _, result in rows:
        verdict = "succeeded" if result.beats_baselines else "failed"
        lines.append(f"| {name} | {' | '.join(shown(result.pooled))} | {verdict} |")
    for name, of in rows[0][2].baselines.items():
        lines.append(f"| baseline: {name.replace('_', ' ')} (of {rows[0][0]}) | {' | '.join(shown(of))} | |")
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
    options = parser.parse_args()
    try:
        rows = found(options.runs, options.attack, options.threat, options.kind)
        grid(rows, options.out)
        print(table(rows))
    except FedauditError as e:
        sys.exit(str(e))
    print(options.out)


if __name__ == "__main__":
    main()
