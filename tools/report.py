"""Write the page of a run: curves, planned pipeline, layout, events, configuration.

One HTML file that fetches nothing; exits 0, or 2 if RUN_DIR is not that of a run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch.build import make_plan
from launch.config import Config, load_config
from launch.partition import layers_of
from megalite.errors import ConfigError
from megalite.parallel_config import mesh_shape
from megalite.report.history import read_history
from megalite.report.page import Layout, Run, render
from megalite.report.series import compact


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="what --run.dir was")
    parser.add_argument("--out", metavar="FILE", type=Path, help="instead of RUN_DIR/report.html")
    args = parser.parse_args(argv)
    out = args.out or args.run_dir / "report.html"
    try:
        write(out, render(read_run(args.run_dir)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report of this run: {out}")
    return 0


def read_run(run_dir: Path) -> Run:
    """All that the page shows.

    Raises:
        ConfigError: if a file is missing or is not what a run writes.
    """
    history = read_history(run_dir)
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(
            "RUN_DIR", f"there is no file {path}", "Name the directory of a run, its --run.dir"
        )
    cfg = load_config(["--config", str(path)])
    return Run(
        name=cfg.run.name or run_dir.resolve().name,
        about=about(cfg),
        num_steps=cfg.train.steps,
        run_dir=cfg.run.dir,
        config=path.read_text(encoding="utf-8"),
        history=history,
        layout=layout(cfg, history.layout),
    )


def about(cfg: Config) -> str:
    """What trains, in a line."""
    model, train = cfg.model, cfg.train
    size = f"{compact(model.num_parameters())} parameters in {model.num_layers} layers"
    batch = f"{train.global_batch_size:,} sequences of {model.seq_length:,} tokens a step"
    return f"{size}, {train.dtype}, {batch}"


def layout(cfg: Config, text: str) -> Layout | None:
    """The layout that a run has written down as ``text``: its dp is not in the configuration."""
    found = re.search(r"\bdp (\d+)", text)
    if not found:
        return None
    dp, parallel = int(found[1]), cfg.parallel
    shape, plan = mesh_shape(parallel, dp * parallel.tp * parallel.pp), make_plan(cfg, dp)
    return Layout(shape, plan, layers_of(cfg, plan))


def write(path: Path, text: str) -> None:
    """Write the page, or raise ConfigError."""
    try:
        path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    except OSError as error:
        raise ConfigError("--out", f"{path}: {error.strerror}", "Name a file") from error


if __name__ == "__main__":
    sys.exit(main())
