"""The command line and the demo's own half: options, progress, figures.  Training is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from libra.cli import demo
from libra.cli.demo import DemoConfig, run_demo, training_command, training_script
from libra.cli.demo_summary import summarise
from libra.cli.main import COMMANDS, main

START = {"event": "start", "ranks": 2, "config": {"steps": 2}, "decoder": {"layers": 3}}


def step(scheme: str, number: int, loss: float, seconds: list[float], load: list[int], sent: int):
    return {
        "event": "step",
        "scheme": scheme,
        "step": number,
        "loss": loss,
        "attention_seconds": seconds,
        "attention_cpu_seconds": [s / 2 for s in seconds],
        "step_seconds": [s + 1 for s in seconds],
        "load": load,
        "bytes_sent": {"q": [sent, 0], "kv": [2 * sent, 0], "o": [0, sent]},
    }


EVENTS = [
    START,
    step("baseline", 0, 5.0, [4.0, 1.0], [40, 10], 0),
    step("baseline", 1, 4.0, [2.0, 2.0], [20, 20], 0),
    step("libra", 0, 5.0, [2.5, 2.6], [25, 25], 7),
    step("libra", 1, 4.001, [2.2, 2.1], [20, 20], 0),
]


def fake_training(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(demo, "training_command", lambda config: [sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 3 --cp 2", "libra: --cp 2 does not divide --ranks 3; ranks = replicas x cp"),
        ("--steps 0", "libra: --steps is 0; it must be an integer >= 1"),
        ("--ranks -1", "libra: --ranks is -1; it must be an integer >= 1"),
        ("--tokens 8", "libra: --tokens is 8; it must be an integer >= 64"),
        ("--ranks 16 --cp 16", "libra: --cp 16 does not divide the decoder's 4 heads"),
    ],
)
def test_unusable_sizes_end_in_one_line_and_code_2(arguments, message, capsys) -> None:
    assert main(["demo", *arguments.split()]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(message)
    assert errors.count("\n") == 1


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "taken").touch()
    assert main(["demo", "--out", str(tmp_path / "taken")]) == 2
    assert "cannot be made (File exists); name a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["demo", "--steps", "many"], ["demo", "--bogus"], ["bogus"], []]
)
def test_unknown_words_end_in_code_2(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_names_every_option_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom libra.cli.main import COMMANDS, main\n"
        "try: main(['demo', '--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for option in ("--ranks", "--cp", "--steps", "--tokens", "--out"):
        assert option in run.stdout
    assert run.stdout.splitlines()[-1] == "False"


def test_help_lists_every_command_with_its_description(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, (options, _) in COMMANDS.items():
        assert f"• {name} {options.__doc__}" in shown


def test_options_reach_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = (DemoConfig, lambda config: seen.append(config) or 0)
    monkeypatch.setitem(COMMANDS, "demo", run)
    words = "--ranks 4 --cp 2 --steps 3 --tokens 512 --out there"
    assert main(["demo", *words.split()]) == 0
    assert seen == [DemoConfig(ranks=4, cp=2, steps=3, tokens=512, out=Path("there"))]


def test_training_starts_under_torchrun_with_the_sizes_asked_for() -> None:
    command = training_command(DemoConfig(ranks=4, cp=2, steps=3, tokens=512))
    assert command[1:4] == ["-m", "torch.distributed.run", "--standalone"]
    assert command[4:] == [
        *("--nproc-per-node", "4", str(training_script())),
        *("--cp", "2", "--steps", "3", "--tokens", "512"),
    ]
    assert training_script().is_file()


def test_speedups_are_ratios_of_summed_stragglers_and_summed_heaviest_loads() -> None:
    summary = summarise(EVENTS)
    assert summary["attention_speedup"]["measured"] == pytest.approx((4.0 + 2.0) / (2.6 + 2.2))
    assert summary["attention_speedup"]["predicted"] == pytest.approx((40 + 20) / (25 + 20))
    assert summary["attention_speedup"]["cpu"] == pytest.approx(3.0 / 2.4)
    assert summary["step_speedup"] == pytest.approx((5.0 + 3.0) / (3.6 + 3.2))
    assert summary["straggler_attention_seconds"]["baseline"] == pytest.approx(3.0)
    assert summary["step_seconds"]["libra"] == pytest.approx(3.4)


def test_a_summary_holds_the_largest_loss_difference_and_the_bytes_of_all_layers() -> None:
    summary = summarise(EVENTS)
    assert summary["largest_loss_difference"] == pytest.approx(0.001)
    assert summary["forward_bytes_moved"]["libra"] == {"q": 21, "kv": 42, "o": 21}
    assert sum(summary["forward_bytes_moved"]["baseline"].values()) == 0


def test_the_demo_writes_its_figures_and_says_where(monkeypatch, tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(event) for event in EVENTS)
    fake_training(monkeypatch, f"print('a warning')\nprint({lines!r})")
    screen = StringIO()
    config = DemoConfig(steps=2, out=tmp_path / "new" / "folder")
    assert run_demo(config, Console(file=screen, width=100)) == 0
    written = json.loads((config.out / "summary.json").read_text())
    assert written["loss"] == {"baseline": [5.0, 4.0], "libra": [5.0, 4.001]}
    assert (config.out / "train.log").read_text() == "a warning\n"
    shown = screen.getvalue()
    for figure in ("1.25x", "1.33x", "50% of a core", "summary.json"):
        assert figure in shown


def test_a_training_run_that_dies_shows_the_end_of_its_log(monkeypatch, tmp_path: Path) -> None:
    fake_training(monkeypatch, "raise SystemExit('rank 1 ran out of luck')")
    screen = StringIO()
    assert run_demo(DemoConfig(out=tmp_path), Console(file=screen, width=100)) == 1
    assert "rank 1 ran out of luck" in screen.getvalue()
    assert not (tmp_path / "summary.json").exists()


def test_only_the_errors_of_ranks_are_printed_where_the_log_has_any(
    monkeypatch, tmp_path: Path
) -> None:
    log = (
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "train.py", line 1, in <module>',
        "[rank1]: ValueError: no such luck",
        "train.py FAILED, says the launcher at length",
    )
    fake_training(monkeypatch, f"raise SystemExit({chr(10).join(log)!r})")
    screen = StringIO()
    assert run_demo(DemoConfig(out=tmp_path), Console(file=screen, width=100)) == 1
    assert "[rank1]: ValueError: no such luck" in screen.getvalue()
    assert "Traceback" not in screen.getvalue()
    assert "at length" not in screen.getvalue()


def test_a_demo_that_is_terminated_ends_its_training_too(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    training = (
        f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        """print('{"event": "start"}', flush=True)\ntime.sleep(60)"""
    )
    code = (
        "import sys\nfrom pathlib import Path\nfrom libra.cli import demo\n"
        f"demo.training_command = lambda config: [sys.executable, '-c', {training!r}]\n"
        f"demo.run_demo(demo.DemoConfig(out=Path({str(tmp_path)!r})))"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
