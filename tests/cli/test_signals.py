"""Ctrl-C and its kin at every moment of a command: no traceback, exit code 130, and what to type next."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
COMMAND = """
import sys, threading, time
from micsctl.cli import app, setup

def version(options):
    print("ready", flush=True)
    {body}

setup.version = version
sys.argv = ["micsctl", "version"]
app.main()
"""
IMPORTING = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            print("ready", flush=True)
            time.sleep(30)

sys.meta_path.insert(0, Slow())
sys.argv = ["micsctl", "version"]
from micsctl.cli import app
app.main()
"""


def started(code: str, **how: object) -> subprocess.Popen[str]:
    """A process that has said that it is ready for its signal."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, **how)  # type: ignore[call-overload]
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_is_explained(number: signal.Signals) -> None:
    process = started(COMMAND.format(body="time.sleep(30)"))
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said == "micsctl: stopped by Ctrl-C\nnext: micsctl status   (what exists, and what costs money)\n"


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_while_the_command_line_is_still_loading(number: signal.Signals) -> None:
    process = started(IMPORTING)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (130, "micsctl: stopped by Ctrl-C\n")


@pytest.mark.parametrize("number", ENDING)
def test_a_second_signal_does_not_wait_for_threads(number: signal.Signals) -> None:
    process = started(COMMAND.format(body="threading.Thread(target=time.sleep, args=(30,)).start(); time.sleep(30)"))
    process.send_signal(number)
    assert process.stderr
    assert process.stderr.readline() == "micsctl: stopped by Ctrl-C\n"
    assert process.stderr.readline().startswith("next:")
    time.sleep(0.2)
    process.send_signal(number)
    assert process.communicate(timeout=20)[1] == ""
    assert process.returncode == 130


@pytest.mark.parametrize("number", ENDING)
def test_signals_without_end_never_show_a_traceback(number: signal.Signals) -> None:
    process = started(COMMAND.format(body="time.sleep(30)"))
    while process.poll() is None:
        process.send_signal(number)
        time.sleep(0.01)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in said


def test_nohup_stays_in_force() -> None:
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    process = started(COMMAND.format(body="time.sleep(0.5)"), **ignoring)
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=20)[1] == ""
    assert process.returncode == 0
