"""16 planted settings: `python -m tests.report.sixteen OUT` leaves the runs in OUT/runs and their
report in OUT/report, and prints the seconds it took. A second argument takes so many of the
settings, a third so many answers of each (1,000), a fourth so many processes.
"""

import sys
import time
from itertools import product
from pathlib import Path

from lm_polygraph_asmi.report import build_report, load_run_groups
from tests.report.runs import content, manifest, save

if __name__ == "__main__":
    root, *sizes = Path(sys.argv[1]), *map(int, sys.argv[2:])
    number, answers, jobs = (*sizes, *(16, 1000, 1)[len(sizes) :])
    settings = [*product("abcd", ("coqa", "squad", "babi", "triviaqa"))][:number]
    for seed, (model, dataset) in enumerate(settings):
        about = manifest(answers, f"asmi_{dataset}")
        about["model"]["name"] = f"planted {model}"
        saved = content(answers, depths=(60, 80), shift=0.1 * seed, seed=seed)
        save(root / "runs" / f"{model}_{dataset}", saved, about)
    start = time.perf_counter()
    file, said = build_report(
        load_run_groups((root / "runs").iterdir()), root / "report",
        jobs=jobs, full=True, formats=("csv", "tex"),
    )  # fmt: skip
    print("\n".join(said))
    print(f"{file}: {len(settings)} settings, {time.perf_counter() - start:.0f} seconds")
