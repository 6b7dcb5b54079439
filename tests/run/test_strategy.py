"""Several workers: launched in every way there is, with the results of one."""

import itertools
import shutil
import socket
import threading
import time
from datetime import timedelta

import pytest
from helpers.subprocess_runs import HANGS, ROOT, RUN, finish, fit_flags, outcome_in, start
from torch.distributed import TCPStore

from dlmi.cli.main import main
from dlmi.errors import RunStopped
from dlmi.run.workers.workers import Workers


@pytest.fixture
def make_workers():
    """Workers of one run that meet at a real store, each with a connection of its own."""

    def make(size, **options):
        host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        clients = [
            TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=30))
            for _ in range(size - 1)
        ]
        return [Workers(store, i, size, **options) for i, store in enumerate([host, *clients])]

    return make


def test_every_number_goes_to_one_worker(make_workers):
    taken = [[] for _ in range(3)]

    def take(workers, mine):
        while (number := workers.take()) < 200:
            mine.append(number)

    pairs = zip(make_workers(3), taken, strict=True)
    threads = [threading.Thread(target=take, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(itertools.chain(*taken)) == list(range(200))


def test_without_the_one_who_counts_there_is_nothing_to_take(make_workers):
    zero, one = make_workers(2)
    assert one.take() == 0
    zero._store = None
    assert one.take() > 10**9


def test_all_get_what_worker_zero_has(make_workers):
    zero, one = make_workers(2)
    assert zero.broadcast({"a": [1, None]}) == {"a": [1, None]}
    assert one.broadcast("ignored") == {"a": [1, None]}
    waiting = threading.Thread(target=one.barrier)
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    zero.barrier()
    waiting.join(timeout=HANGS)
    assert not waiting.is_alive()


def test_a_worker_that_died_is_not_waited_for(make_workers):
    zero, _ = make_workers(2, ended=lambda: "worker 1 of 2 has ended (exit code 1)")
    with pytest.raises(RunStopped, match="worker 1 of 2 has ended"):
        zero.barrier()


def test_a_worker_that_never_comes_is_not_waited_for(make_workers):
    zero, _ = make_workers(2)
    with pytest.raises(RunStopped, match="not all of 2 workers came within 0 s"):
        zero.barrier(within=0)


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_workers_gives_the_same_rows(workers, model_folder, tmp_path, undisturbed):
    process = start(fit_flags(model_folder(), "--trainer.devices", workers), tmp_path)
    output, errors = finish(process)
    assert outcome_in(tmp_path / RUN) == undisturbed
    assert f"on each of {workers} workers" in output
    assert output.count("\nk3_sample") == 12  # the screen shows all workers' targets
    assert "│ 3 │      12 │" in output
    names = {path.name for path in (tmp_path / RUN).iterdir()}
    assert not any(name.startswith("results.worker") for name in names)
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]
    assert not errors.strip()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_torchrun(model_folder, tmp_path, undisturbed):
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "dlmi")
    finish(start(fit_flags(model_folder(), "--trainer.devices", 2), tmp_path, launcher))
    assert outcome_in(tmp_path / RUN) == undisturbed


def test_two_nodes(model_folder, tmp_path, undisturbed):
    """Two machines are two commands with the same address and their own NODE_RANK."""
    flags = fit_flags(model_folder(), "--trainer.devices", 1, "--trainer.num_nodes", 2)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    nodes = [start(flags, tmp_path, NODE_RANK=str(node), **place) for node in range(2)]
    for node in nodes:
        finish(node)
    assert outcome_in(tmp_path / RUN) == undisturbed


def test_slurm_starts_the_workers(model_folder, tmp_path, undisturbed):
    flags = fit_flags(model_folder(), "--trainer.devices", 2)
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "invert", "SLURM_NTASKS": "2"}
    job |= {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "127.0.0.1", "SLURM_NODEID": "0"}
    job |= {"MASTER_PORT": free_port()}
    tasks = [
        start(flags, tmp_path, **job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
        for rank in range(2)
    ]
    for task in tasks:
        finish(task)
    assert outcome_in(tmp_path / RUN) == undisturbed


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true"])
def test_plain_ddp_is_refused(strategy, model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = fit_flags(model_folder(), "--trainer.devices", 2, "--trainer.strategy", strategy)
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "TargetParallelStrategy" in line
    assert "makes the prompts of all workers equal" in line


def test_a_worker_that_dies_on_its_way_ends_the_run(model_folder, tmp_path):
    """Worker 1 cannot read the LM that worker 0 has: its folder is gone when it comes."""
    lm = tmp_path / "lm"
    shutil.copytree(model_folder(), lm)
    vanish = f"import os, shutil; os.environ.get('LOCAL_RANK') == '1' and shutil.rmtree('{lm}')"
    (tmp_path / "sitecustomize.py").write_text(vanish)
    flags = fit_flags(lm, "--trainer.devices", 2)
    _, errors = finish(start(flags, tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}"), exit_code=1)
    assert "worker 1 of 2 has ended (exit code 2)" in errors


def test_a_mistake_is_told_once_before_workers_are_started(model_folder, capsys):
    flags = fit_flags(model_folder(), "--trainer.devices", 2, "--model.prompt_length", 900)
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "prompt_length" in line
