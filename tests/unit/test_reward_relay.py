"""Reward workers behind a relay, on loopback: the scores, limits and ends of local ones; strangers are turned away."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megarl.config.load import load_config
from megarl.config.rewards import RewardSettings
from megarl.config.scoring import ScoringSettings
from megarl.core.errors import ConfigError, EngineError
from megarl.launch.hosted import HostedRelay
from megarl.launch.ray_plan import ClusterNode, Placement, lack, plan_placement, require_private
from megarl.rewards import Reward
from megarl.rewards.outcome import Failure
from megarl.rewards.pool import WorkerPool
from megarl.rewards.relay_link import Relay, Relays, framed, may_listen, meet_relay, read_relays
from megarl.rewards.worker_calls import worker_spec
from megarl.rewards.worker_process import WorkerSpec
from tests.unit.test_hostile_rewards import ENDED, RAISED, SLOW, outcome, parcel, processes

ROOT = Path(__file__).parents[2]
LOOPBACK = "127.0.0.1"
TOKEN = os.urandom(32).hex()
ATTACK = "tests.unit.hostile_functions:attack"


@contextmanager
def relay_at(directory: Path = ROOT) -> Iterator[tuple[Relays, psutil.Process]]:
    """A relay, and the certainty that nothing below it is left when it is killed."""
    hosted = HostedRelay()
    port, why = hosted.start(LOOPBACK, TOKEN, str(directory))
    assert port, why
    process = psutil.Process(hosted.pid)
    try:
        yield Relays((Relay(LOOPBACK, port, 2),), TOKEN), process
    finally:
        below = process.children(recursive=True) if process.is_running() else []
        hosted.close()
        assert psutil.wait_procs(below, timeout=10)[1] == []


@pytest.fixture(scope="module")
def relay() -> Iterator[tuple[Relays, psutil.Process]]:
    with relay_at() as found:
        yield found


def kinds(spec: WorkerSpec, words: list[str]) -> list[str | float]:
    with closing(WorkerPool(spec, 1)) as pool:
        found = [outcome(future) for future in [pool.submit(parcel(word)) for word in words]]
    return [got.kind if isinstance(got, Failure) else got.value for got in found]


def wait_until_idle(process: psutil.Process) -> None:
    """Closing a connection ends all that was below, within the second; the machine may be busy."""
    deadline = time.monotonic() + 5.0
    while any(is_running(one) for one in process.children(recursive=True)):
        assert time.monotonic() < deadline, process.children(recursive=True)
        time.sleep(0.02)


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it ended between two looks
        return False


def test_what_workers_elsewhere_say_is_what_local_ones_say(
    relay: tuple[Relays, psutil.Process], tmp_path: Path
) -> None:
    words = ["fine", "loop without signals", "exit hard", "many forks", "fine", "leave daemon", "crash", "exit soft"]
    log = tmp_path / "reward.log"
    for relays in (None, relay[0]):
        found = kinds(WorkerSpec(ATTACK, timeout_seconds=1.0, log=log if relays else None, relays=relays), words)
        assert found.pop(3) in (ENDED, SLOW)  # whoever is faster: the count of processes or the clock
        assert found == [1.0, SLOW, ENDED, 1.0, 0.5, ENDED, RAISED]
    assert log.read_text().startswith(f"worker of reward {ATTACK}, isolation: ")
    wait_until_idle(relay[1])


def test_a_worker_that_is_given_up_ends_at_once_with_all_its_processes(relay: tuple[Relays, psutil.Process]) -> None:
    with closing(WorkerPool(WorkerSpec(ATTACK, timeout_seconds=60.0, relays=relay[0]), 1)) as pool:
        assert outcome(pool.submit(parcel("leave daemon"))) == Reward(0.5)
        pool.submit(parcel("loop without signals"))
        # two guards, first processes and workers, and a daemon
        assert len(relay[1].children(recursive=True)) >= 5
    wait_until_idle(relay[1])


def test_a_long_sample_gets_there(relay: tuple[Relays, psutil.Process], tmp_path: Path) -> None:
    """Longer than all buffers between the driver and the worker together."""
    with relay_at(tmp_path) as (relays, _):
        (tmp_path / "far_rewards.py").write_text("def length(prompt, sample):\n    return len(sample.response)\n")
        with closing(WorkerPool(WorkerSpec("far_rewards:length", relays=relays), 1)) as pool:
            asked = [pool.submit(parcel("x" * size)) for size in (1, 10**7, 3)]
            assert [outcome(future) for future in asked] == [Reward(1), Reward(10**7), Reward(3)]
    # this relay runs in another directory, which has no such module
    with (
        closing(WorkerPool(WorkerSpec("far_rewards:length", relays=relay[0]), 1)) as pool,
        pytest.raises(ConfigError, match="far_rewards"),
    ):
        outcome(pool.submit(parcel("x")))


def test_a_worker_elsewhere_knows_no_secrets_and_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import os\ndef seen(prompt, sample):\n    return sum(sample.response in text for text in texts())\n"
    source += "def texts():\n    yield from os.environ.values()\n    for place in ('environ', 'cmdline'):\n"
    source += "        for name in filter(str.isdigit, os.listdir('/proc')):\n            try:\n"
    source += "                yield open(f'/proc/{name}/{place}').read()\n            except OSError:\n"
    source += "                pass\n"
    (tmp_path / "curious.py").write_text(source)
    monkeypatch.setenv("API_KEY", "very-secret-value")
    with relay_at(tmp_path) as (relays, process):
        assert TOKEN not in " ".join([*process.cmdline(), *process.environ().values()])
        found = kinds(WorkerSpec("curious:seen", relays=relays), ["very-secret-value", TOKEN, "PYTHONHASHSEED"])
    assert found[:2] == [0.0, 0.0]
    assert found[2] != 0.0, "it does look"


def test_a_killed_relay_is_told_and_its_samples_are_not_to_blame() -> None:
    with relay_at() as (relays, process):
        below = []
        with closing(WorkerPool(WorkerSpec(ATTACK, timeout_seconds=60.0, relays=relays), 1)) as pool:
            assert outcome(pool.submit(parcel("fine"))) == Reward(1.0)
            asked = pool.submit(parcel("sleep"))
            below = process.children(recursive=True)
            process.kill()
            with pytest.raises(EngineError, match=r"MRL-5324 .*relay for reward workers at 127\.0\.0\.1:\d+ cannot be"):
                outcome(asked)
        assert psutil.wait_procs(below, timeout=10)[1] == []


def test_when_one_of_two_relays_is_killed_the_other_goes_on() -> None:
    with relay_at() as (first, process), relay_at() as (second, _):
        both = Relays(first.places + second.places, TOKEN)
        assert both.num_cpus == 4
        with closing(WorkerPool(WorkerSpec(ATTACK, timeout_seconds=60.0, relays=both), 2)) as pool:
            assert [outcome(pool.submit(parcel("fine"))) for _ in range(4)] == [Reward(1.0)] * 4
            process.kill()
            asked = [pool.submit(parcel("fine")) for _ in range(20)]
            assert [outcome(future) for future in asked] == [Reward(1.0)] * 20


def test_a_relay_ends_with_its_parent_and_a_worker_with_its_driver(tmp_path: Path) -> None:
    program = (
        "import time\nfrom contextlib import closing\nfrom megarl.launch.hosted import HostedRelay\n"
        "from megarl.rewards.pool import WorkerPool\nfrom megarl.rewards.relay_link import Relay, Relays\n"
        "from megarl.rewards.worker_process import WorkerSpec\n"
        "from tests.unit.test_hostile_rewards import parcel\n"
        f"port, _ = HostedRelay().start('{LOOPBACK}', '{TOKEN}', None)\n"
        f"relays = Relays((Relay('{LOOPBACK}', port, 1),), '{TOKEN}')\n"
        f"pool = WorkerPool(WorkerSpec('{ATTACK}', relays=relays), 1)\n"
        "pool.submit(parcel('leave daemon')).result()\nprint('ready', flush=True)\ntime.sleep(1000)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, cwd=ROOT)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    below = psutil.Process(parent.pid).children(recursive=True)
    assert len(below) >= 1 + 2 + 3, "the relay, two processes that stand for workers, and a worker"
    parent.kill()
    parent.communicate()
    assert psutil.wait_procs(below, timeout=10)[1] == []
    # by each of them, also by those that were just being started
    deadline = time.monotonic() + 10.0
    while left := list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, f"{left} is not removed"
        time.sleep(0.02)


def test_a_wrong_token_is_refused_on_both_sides(relay: tuple[Relays, psutil.Process]) -> None:
    wrong = Relays(relay[0].places, os.urandom(32).hex())
    with (
        closing(WorkerPool(WorkerSpec(ATTACK, relays=wrong), 1)) as pool,
        pytest.raises(EngineError, match="it turns this run away"),
    ):
        outcome(pool.submit(parcel("fine")))
    with socket.create_server((LOOPBACK, 0)) as impostor:
        spec = WorkerSpec(ATTACK, relays=Relays((Relay(LOOPBACK, impostor.getsockname()[1], 1),), TOKEN))
        with closing(WorkerPool(spec, 1)) as pool:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(bytes(64))
                # nothing but random bytes and a digest is said to whoever cannot answer
                assert len(b"".join(iter(lambda: connection.recv(4096), b""))) == 64


def closes_without_a_word(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" * 8, bytes(64)], ids=["http", "zeros"])
def test_strangers_start_nothing(said: bytes, relay: tuple[Relays, psutil.Process]) -> None:
    place, before = relay[0].places[0], processes()
    with socket.create_connection((place.host, place.port), 10.0) as connection:
        assert len(connection.recv(32)) == 32
        connection.sendall(said)
        assert closes_without_a_word(connection)
    assert processes() <= before


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff\xff\xff\xff",
        framed(b"[]") * 2,
        framed(b"\x00\x01") * 2,
        framed(b'{"memory_bytes": "much", "log": ""}') * 2,
        framed(json.dumps({"memory_bytes": 1 << 33, "log": ""}).encode()) + framed(b"[[[]]]"),
        framed(b"[" * 100_000) * 2,
    ],
    ids=["nothing", "too long", "lists", "no text", "no number", "no mapping", "deep"],
)
def test_garbage_starts_nothing(said: bytes, relay: tuple[Relays, psutil.Process]) -> None:
    """Even from somebody who knows the token."""
    place, before = relay[0].places[0], processes()
    with socket.create_connection((place.host, place.port), 10.0) as connection:
        assert meet_relay(connection, TOKEN)
        with suppress(OSError):  # the relay may have hung up in the middle of it
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
        assert closes_without_a_word(connection)
    assert processes() <= before


@pytest.mark.parametrize(
    ("host", "is_private"),
    [
        ("127.0.0.1", True), ("::1", True), ("10.1.2.3", True), ("192.168.0.9", True), ("172.20.0.1", True),
        ("100.64.0.1", True), ("fd00::1", True),
        ("0.0.0.0", False), ("::", False), ("8.8.8.8", False), ("2001:4860:4860::8888", False), ("224.0.0.1", False),
        ("localhost", False), ("", False),
    ],
)  # fmt: skip
def test_a_relay_listens_in_private(host: str, is_private: bool) -> None:
    assert may_listen(host) is is_private


def test_a_relay_refuses_a_public_address() -> None:
    hosted = HostedRelay()
    with closing(hosted):
        assert hosted.start("0.0.0.0", TOKEN, None) == (
            0,
            "0.0.0.0 is no private address: a relay for reward workers does not listen there.",
        )


def test_relays_travel_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    relays = Relays((Relay("10.0.0.1", 5000, 8), Relay("fd00::1", 5001, 8)), TOKEN)
    assert read_relays({}) is None
    assert read_relays(relays.variables()) == relays
    assert TOKEN not in repr(relays)
    for name, value in relays.variables().items():
        monkeypatch.setenv(name, value)
    assert worker_spec(RewardSettings(name="code"), ScoringSettings(), None).relays == relays
    for name in relays.variables():
        for wrong in ("", "[]", "{}", "[1]", '[{"host": "a"}]'):
            with pytest.raises(ConfigError, match="MRL-1675"):
                read_relays({**relays.variables(), name: wrong})


def test_nodes_for_rewards_are_nodes_without_ranks() -> None:
    gpus, cores = ClusterNode("10.0.0.1", 32, 4), ClusterNode("10.0.0.2", 32, 0)
    settings = ("launch.reward_nodes=1", "launch.reward_cpus=16")
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["run.num_ranks=4", *settings])
    expected = Placement(1, 4, "GPU", 0, 1, 16)
    assert plan_placement(config, [gpus, cores], None) == expected
    assert expected.bundles == [{"CPU": 4.0, "GPU": 4.0}, {"CPU": 16.0}]
    assert not expected.fits([gpus]), "a node has ranks or rewards"
    assert expected.fits([gpus, gpus])
    assert not expected.fits([cores, cores])
    text = str(lack(expected, [gpus], 4.0, 300))
    assert "needs 1 node with 4 GPUs each and 1 more with 16 free CPUs each for rewards" in text
    assert "10.0.0.1 with 4 and 32 CPUs" in text


def test_samples_do_not_travel_over_a_public_network() -> None:
    require_private(["127.0.0.1", "10.0.0.1"])
    with pytest.raises(ConfigError, match=r"MRL-1676 launch\.reward_nodes .*: 8\.8\.8\.8\."):
        require_private(["10.0.0.1", "8.8.8.8"])
