"""The figures of docs/results/speed.md are those of the files beside it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def test_the_table_is_what_was_measured() -> None:
    spec = importlib.util.spec_from_file_location("speed_table", RESULTS / "speed_table.py")
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    text = (RESULTS / "speed.md").read_text()
    for head, found in table.tables(RESULTS / "speed").items():
        assert len(found) > 5
        assert "\n".join([head, *found, ""]) in text, "python docs/results/speed_table.py --write"


def test_what_it_says_of_them_holds() -> None:
    kept = {path.stem: json.loads(path.read_text()) for path in (RESULTS / "speed").glob("*.json")}
    fedavg, cnn, dfrd, shadows = (kept[name] for name in ("fedavg", "fedfree_cnn", "dfrd", "shadows"))
    assert round(fedavg["stacked_tf32_compiled"]["round_times"], 1) == 3.6
    assert round(fedavg["stacked"]["round_times"], 1) == 1.7
    assert (round(cnn["stacked"]["round_times"], 1), round(cnn["stacked"]["clients_times"])) == (4.5, 14)
    assert (round(cnn["stacked"]["round_s"], 2), round(cnn["stacked"]["codec_s"], 2)) == (1.05, 0.47)
    assert (round(dfrd["stacked"]["server_times"], 1), round(dfrd["stacked_tf32"]["server_times"], 1)) == (1.4, 1.5)
    assert round(dfrd["stacked"]["server_s"] / 400 * 1000) == 14  # ms, of 40 turns of 5 and 5 steps
    assert round(dfrd["serial"]["codec_s"], 2) == 0.23
    assert set(dfrd["stacked"]["products_faster"]) == {False}
    quieter = {path.stem: json.loads(path.read_text()) for path in (RESULTS / "speed" / "quieter").glob("*.json")}
    assert round(quieter["fedavg"]["stacked_tf32_compiled"]["round_times"], 1) == 4.0
    assert round(quieter["fedfree_cnn"]["stacked"]["round_times"], 1) == 5.2
    assert (shadows["stacked_compiled"]["times"], shadows["stacked_recorded"]["times"]) == (12.0, 4.9)
    assert round(kept["fedaf"]["stacked_tf32"]["round_s"]) == 33
    assert round(kept["fedaf"]["stacked_tf32"]["clients_s"]) == 25
    same = kept["equality"]
    assert all(same[f"{name}_recorded_same_bits"] for name in ("fedavg", "dfrd", "dffke"))
    for name, most in (("fedavg", 3e-16), ("dfrd", 6e-17), ("dffke", 2e-14)):
        assert same[f"{name}_farthest_float64"] <= most
