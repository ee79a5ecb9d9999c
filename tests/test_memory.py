"""Freed memory stays with the process, where the C library can be told so, until it has to wait."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from dpcsgp.runtime.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
torch.set_num_threads(1)
for _ in range(10):
    torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_block_that_was_freed_is_handed_out_again_without_page_faults() -> None:
    faults = {
        way: int(
            subprocess.run(
                [sys.executable, "-c", SCRIPT, way], capture_output=True, text=True, check=True
            ).stdout
        )
        for way in ("keep", "default")
    }
    assert faults["default"] > 100  # 64 MB go back to the system and come again, ten times
    assert faults["keep"] < faults["default"] / 3


GIVEN_BACK = """
import torch
from dpcsgp.runtime.memory import keep_freed_memory, return_freed_memory
def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4 // 1024
assert keep_freed_memory()
blocks = [torch.ones(2**20) for _ in range(50)]
last = torch.ones(1000)  # above the freed blocks: the heap cannot simply become shorter
full = megabytes()
del blocks
kept = megabytes()
return_freed_memory()
print(full - kept, kept - megabytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_process_that_waits_gives_back_what_it_kept() -> None:
    words = [sys.executable, "-c", GIVEN_BACK]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    freed_at_once, given_back = map(int, done.stdout.split())
    assert freed_at_once < 20 and given_back > 150
