"""Two gloo processes of a test, which meet at a file and not at a port that another may take."""

import os

import torch
import torch.distributed as dist
from torch import multiprocessing

SECONDS = 120  # that a process may take


def of_two(work, folder):
    """What `work(rank, results)` has put into `results` in both processes, a dict."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        processes = [
            context.Process(target=_ranked, args=(work, rank, folder, results), daemon=True)
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
        stuck = [process for process in processes if process.is_alive()]
        for process in stuck:
            process.kill()
        assert not stuck, f"hangs after {list(results.keys())}"
        codes = [process.exitcode for process in processes]
        assert codes == [0, 0], f"{codes} after {list(results.keys())}"
        return dict(results)


def _ranked(work, rank, folder, results):
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    try:
        work(rank, results)
        dist.barrier()  # who leaves while the other still talks may take it down
    finally:
        dist.destroy_process_group()
    # The results are out. A thread of gloo that asks for the interpreter while it ends would abort.
    os._exit(0)
