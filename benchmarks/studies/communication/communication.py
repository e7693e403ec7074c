"""The tables of docs/results/communication.md, planned: no training, no data. Prints Markdown."""

from __future__ import annotations

import math

from fedaudit.runtime.planned_traffic import plan_traffic
from fedaudit.setting import Setting

RIVALS = {  # as FedZGE's Table 8 bills them
    "FedAvg": {"method": "fedavg"},
    "MHAT": {"method": "mhat"},
    "DS-FL": {"method": "dsfl"},
    "FedGen": {"method": "fedgen", "preset": "fedzge"},
    "FedFTG": {"method": "fedftg", "set": {"host": {"start": "global"}}},
    "DFRD": {"method": "dfrd", "set": {"host": {"start": "global"}}},
    "FedZKT": {"method": "fedzkt"},
    "FedZGE": {"method": "fedzge"},
}
DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}
RESNETS = {"ResNet-18": "resnet18", "ResNet-34": "resnet34", "ResNet-50": "resnet50"}
MIXED = {"model": "resnet18:3,resnet34:3,resnet50:4", "server_model": "resnet50"}


def gib(**values) -> str:
    planned = plan_traffic(Setting.make(**{"model": "resnet18", "clients": 10, "rounds": 100, **values}))
    return f"{planned['total']['GiB']:.2f}"


def table(title: str, head: list[str], rows: dict[str, list[str]]) -> None:
    print(f"\n### {title}\n")
    print(f"| {' | '.join(head)} |")
    print(f"|---{'|---:' * (len(head) - 1)}|")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


def fedzge() -> None:
    both = [f"{name}, {data}" for data in DATA for name in RESNETS]
    rows = {
        rival: [gib(dataset=data, model=model, **of) for data in DATA.values() for model in RESNETS.values()]
        for rival, of in RIVALS.items()
    }
    table("FedZGE, Tables 2 and 3: GiB, 10 clients, 100 rounds", ["method", *both], rows)
    rows = {
        rival: [gib(dataset=data, **MIXED, **of) for data in DATA.values()]
        for rival, of in RIVALS.items()
        if rival not in ("FedAvg", "FedGen")
    }
    table("FedZGE, Table 4: GiB, ResNet-18, -34 and -50 in a ratio of 3:3:4", ["method", *DATA], rows)
    cells = {f"q = {q}": {"q": q} for q in (10, 1, 5, 20)}
    cells |= {"with L_fid only": {"beta_1": 0.0, "beta_2": 0.0, "beta_3": 0.0}, "without L'_k": {"E_prime": 0}}
    rows = {
        name: [gib(method="fedzge", dataset=data, model="resnet50", set=options) for data in DATA.values()]
        for name, options in cells.items()
    }
    table("FedZGE, Table 5: GiB, ResNet-50", ["variant", *DATA], rows)
    head = [f"{share}, {data}" for data in DATA for share in (0.1, 0.5, 1.0)]
    rows = {
        rival: [
            gib(dataset=data, clients=50, participation=share, **of)
            for data in DATA.values()
            for share in (0.1, 0.5, 1.0)
        ]
        for rival, of in RIVALS.items()
    }
    table("FedZGE, Tables 9 and 10: GiB, 50 clients, share sampled", ["method", *head], rows)


def fedaf() -> None:
    published = {
        "fashion-mnist": (0.06, 0.09, 0.14),
        "cifar10": (0.22, 0.31, 0.44),
        "cifar100": (1.93, 2.46, 3.22),
    }
    rows = {}
    for data, cells in published.items():
        for alpha, cell in zip((0.02, 0.05, 0.1), cells, strict=True):
            row = [f"{cell:.2f}"]
            for partition, least in (("dirichlet-capped", 50), ("dirichlet", 50), ("dirichlet", 1)):
                values = {"dataset": data, "partition": f"{partition}:{alpha}", "set": {"least": least}}
                setting = Setting.make(method="fedaf", model="convnet", clients=10, rounds=1, **values)
                planned = plan_traffic(setting, draws=100)
                mean = next(r["bytes"] for r in planned["fields"] if r["field"] == "Condensed.S") / 10 / 2**20
                std = planned["up"]["bytes_std"] / 10 / 2**20 / math.sqrt(3)
                row.append(f"{mean:.3f} ± {std:.3f}")
            rows[f"{data}, alpha = {alpha}"] = row
    head = ["data", "printed", "capped, 50 or more", "plain, 50 or more", "plain, every class present"]
    table("FedAF, Table 7: MiB of condensed images of a client, IPC 50", head, rows)


def fedaf_models() -> None:
    """What the rivals of its Table 1 send, by the two models of Table 7."""
    models = {"ConvNet": {"model": "convnet", "image_size": 64}, "ResNet-18": {"model": "resnet18", "image_size": 64}}
    rows = {}
    for rival in ("fedavg", "fedprox", "fedbn", "moon", "feddyn", "fedgen"):
        cells = []
        for of in models.values():
            setting = Setting.make(method=rival, preset="fedaf", dataset="cifar10", clients=10, rounds=1, **of)
            planned = plan_traffic(setting)
            cells += [f"{planned[way]['bytes_per_round'] / 10 / 2**20:.2f}" for way in ("up", "down")]
        rows[rival] = cells
    head = ["method", *(f"{model}, {way}" for model in models for way in ("up", "down"))]
    table("FedAF, Table 7, all rivals: MiB of a client in a round, CIFAR-10 at 64 x 64", head, rows)


def dffke_rivals() -> None:
    """The methods of its Tables 2 and 3 over its 300 rounds."""
    values = {"dataset": "cifar100", "model": "HtFE-1/512", "clients": 10, "image_size": 128, "public": 0.1}
    rows = {}
    names = ["lgfedavg", "fedgen_lg", "fedgh", "fml", "fedkd", "feddistill", "fedproto", "fedtgp", "fedktl", "dffke"]
    for rival in ["fedavg", *names]:
        planned = plan_traffic(Setting.make(method=rival, rounds=300, **values))
        ways = [f"{planned[way]['bytes'] / 2**20 / 1000:.3f}" for way in ("up", "down")]
        rows[rival] = [*ways, f"{planned['total']['MiB'] / 1000:.3f}"]
    head = ["method", "up", "down", "total"]
    table("DFFKE, the rivals of Tables 2 and 3: 1000 MiB, CIFAR-100, ResNet-18, 10 clients, 300 rounds", head, rows)


def dffke() -> None:
    values = {"dataset": "cifar100", "model": "resnet18", "clients": 10, "image_size": 128}
    rows = {}
    for name, method, rounds in (("FedAvg, 200 rounds", "fedavg", 200), *(
        (f"DFFKE, {T} rounds", "dffke", T) for T in (1, 20, 21, 22, 23, 24, 25)
    )):  # fmt: skip
        for convention in ("payload", "wire"):
            total = plan_traffic(Setting.make(method=method, rounds=rounds, **values), convention)["total"]
            cells = [f"{total['GB']:.2f}", f"{total['GiB']:.2f}", f"{total['MiB'] / 1000:.2f}"]
            rows[f"{name}, {convention}"] = cells
    table("DFFKE, Section 4.3: CIFAR-100, ResNet-18, 10 clients", ["", "GB", "GiB", "1000 MiB"], rows)


if __name__ == "__main__":
    fedzge()
    fedaf()
    fedaf_models()
    dffke()
    dffke_rivals()
