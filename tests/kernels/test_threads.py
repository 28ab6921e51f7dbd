"""The threads of ``threads.c`` do each part of a job once, whoever calls, and with fewer threads than wanted."""

import os
import pathlib
import shlex
import subprocess

import pytest

import cpu_driver
from qflash.kernels.cpu import launch

KERNELS = pathlib.Path(launch.__file__).parent
COMPILER = shlex.split(os.environ.get("CC", "cc"))
DRIVER = r"""
#include "threads.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
enum { CALLERS = 20, JOBS = 400 };
typedef struct { int done[8]; int64_t count; int wrong; } counts;
static void part(const void *given, worker me) {
    counts *x = (counts *)given;
    if (me.count != x->count || me.number < 0 || me.number >= me.count) x->wrong = 1;
    else __atomic_add_fetch(&x->done[me.number], 1, __ATOMIC_RELAXED);
}
static void *call(void *given) {
    int64_t seed = (intptr_t)given, wrong = 0;
    for (int i = 0; i < JOBS; i++) {
        counts x = {.count = 1 + (seed + i) % 7};
        qflash_on_threads(x.count, part, &x);
        for (int number = 0; number < 8; number++) wrong += x.done[number] != (number < x.count);
        wrong += x.wrong;
    }
    return (void *)(intptr_t)wrong;
}
int main(void) {
    pthread_t threads[CALLERS];
    intptr_t wrong = (intptr_t)call((void *)3);
    for (intptr_t i = 0; i < CALLERS; i++) pthread_create(threads + i, NULL, call, (void *)i);
    for (int i = 0; i < CALLERS; i++) {
        void *more;
        pthread_join(threads[i], &more);
        wrong += (intptr_t)more;
    }
    pid_t child = fork();
    if (!child) {
        counts x = {.count = 1};
        qflash_on_threads(4, part, &x);
        _exit(x.wrong || x.done[0] != 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    printf("%d wrong, forked %d", (int)wrong, status);
    return 0;
}
"""
REFUSE = """
#include <pthread.h>
static int refuse(void) { return 11; }
#define pthread_create(...) refuse()
"""


@pytest.mark.parametrize("case", ["threads", "no threads", "races"])
def test_each_part_is_done_once(case: str, tmp_path: pathlib.Path) -> None:
    """With 20 callers, more than there are pools; where the system gives no threads; and without a race."""
    (tmp_path / "driver.c").write_text(DRIVER, encoding="utf-8")
    flags: list[str] = []
    shared: list[str] = []
    if case == "no threads":
        (tmp_path / "refuse.h").write_text(REFUSE, encoding="utf-8")
        flags = ["-Wno-unused-function", "-include", str(tmp_path / "refuse.h")]
    if case == "races":
        if reason := cpu_driver._cannot_run(cpu_driver.NOTHING, cpu_driver.RACES):
            pytest.skip(reason)
        flags = shared = [*cpu_driver.RACES]
    common = [*COMPILER, "-O2", "-Wall", "-Wextra", "-Werror", "-fopenmp", f"-I{KERNELS}"]
    for command in ([*flags, "-c", str(KERNELS / "threads.c")], [*shared, "driver.c", "threads.o", "-o", "driver"]):
        subprocess.run([*common, *command], check=True, cwd=tmp_path, timeout=120)
    done = subprocess.run([tmp_path / "driver"], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 wrong, forked 0", "")
