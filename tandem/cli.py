"""The command line. Light to import: torch comes with what computes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

app = typer.Typer(
    help="Post-train language models with PPO: actor and critic together, synchronously or asynchronously.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Recipe = Annotated[str, typer.Argument(help="A shipped recipe (quickstart, ...) or the path of a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value, as in ppo.max_num_steps=20", show_default=False)
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command()
def train(recipe: Recipe, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train by a recipe, or go on with a run: give its directory. Ctrl-C ends a run, its checkpoints stay."""
    from tandem.config.load import load
    from tandem.config.recipes import run_config

    here = [f"run_dir={recipe}"] if run_config(recipe) else []  # wherever the directory has been moved to
    loaded = load(recipe, [*here, *(overrides or [])])
    from tandem.launch.session import train as train_by

    raise typer.Exit(train_by(loaded))


@app.command()
def check(recipe: Recipe, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print the effective config with the origin of every value, and the memory plan; or every error. Needs no GPU."""
    from tandem.config.check import render
    from tandem.config.load import load

    loaded, console = load(recipe, overrides or []), Console()
    console.print(render(loaded), soft_wrap=True, highlight=False)
    from tandem.launch.memory.report import report

    for part in report(loaded):
        console.print(part, soft_wrap=isinstance(part, Text), highlight=False)


@app.command()
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(help="Look at what this recipe needs, too.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    run: Annotated[bool, typer.Option(help="Train one tiny step at the end.")] = True,
    debug: Debug = False,
) -> None:
    """Look for what keeps a run from working here: packages, GPUs, limits, disk, ports. Each with what mends it."""
    from tandem.launch.doctor.report import doctor as look

    raise typer.Exit(look(recipe, overrides or [], run=run, console=Console(highlight=False)))


@app.command(name="eval")
def evaluate(
    target: Annotated[
        str,
        typer.Argument(help="A run directory, one of its checkpoints, a model (a folder or a hub name), or a recipe."),
    ],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="What to score, instead of the recipe's data.validation: a file, a public set (gsm8k, math_500, ...), "
            "or NAME:FILE for a local copy of one. May be given several times.",
            show_default=False,
        ),
    ] = None,
    verifier: Annotated[
        str | None, typer.Option(help="The name of the verifier.", show_default="the recipe's, gsm8k for a model")
    ] = None,
    k: Annotated[int | None, typer.Option(help="Answers to each prompt: pass@k, mean@k.", show_default=False)] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of the answers; 0 is greedy.", show_default="the recipe's val_temperature")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Score the first prompts only.", show_default="all of --data, or the recipe's")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Prompts that are answered at one time.", show_default="the recipe's")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="A new folder for the answers.", show_default="evals/TIME, of a run in its folder"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Score data with a run's newest checkpoint, one of its checkpoints, a model, or a recipe's model."""
    from tandem.launch.evaluate import Asked, evaluate_target

    evaluate_target(target, overrides or [], Asked(tuple(data or ()), verifier, k, temperature, limit, batch, out))


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="A run directory (its newest sound checkpoint) or a checkpoint.")],
    out: Annotated[str, typer.Argument(help="The directory to make.")],
    overrides: Overrides = None,
    model: Annotated[str, typer.Option(help="actor or critic.")] = "actor",
    best: Annotated[bool, typer.Option("--best", help="The run's best checkpoint, not its newest.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16.", show_default="the recipe's precision")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in OUT.")] = False,
    debug: Debug = False,
) -> None:
    """Write a trained model as a Hugging Face directory that transformers loads and generates with."""
    from tandem.launch.export import export_target

    export_target(checkpoint, out, overrides or [], model=model, best=best, dtype=dtype, overwrite=overwrite)


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="A run directory, or one of its checkpoints.")], debug: Debug = False
) -> None:
    """Print what a run directory holds: how far it is, its checkpoints and files, and how to go on."""
    from tandem.launch.show import show as show_run

    show_run(run)


@app.command()
def replay(
    run: Annotated[str, typer.Argument(help="A run directory with flight records.")],
    step: Annotated[int, typer.Option(help="The step, as in metrics.jsonl.")],
    tolerance: Annotated[float, typer.Option(help="Relative; 0 asks for the same bits.")] = 1e-5,
    debug: Debug = False,
) -> None:
    """Compute a recorded step's advantages and losses again, on the CPU: does the record match? (1 if not.)"""
    from tandem.launch.replay import replay as replay_run

    raise typer.Exit(replay_run(run, step, tolerance=tolerance))


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(help="Run directories; several are drawn over each other.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write.", show_default="report.html, of a single run in its directory"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write one HTML file about runs: curves, samples, the timeline, verdicts, and single tokens. Needs no network."""
    from tandem.launch.report import report as write

    write(runs, out)


@app.command()
def simulate(
    recipe: Recipe,
    overrides: Overrides = None,
    engines: Annotated[int, typer.Option(help="Engines.")] = 8,
    slots: Annotated[int, typer.Option(help="Sequences that an engine writes at one time.")] = 64,
    tokens_per_s: Annotated[float, typer.Option(help="Tokens that each sequence gets a second.")] = 50.0,
    trainers: Annotated[int, typer.Option(help="Trainers; they share a step's tokens.")] = 8,
    train_tokens_per_s: Annotated[float, typer.Option(help="Of one trainer, all passes of a step together.")] = 3000.0,
    length_law: Annotated[
        str, typer.Option(help="fixed, lognormal or heavy (a tail of long responses).")
    ] = "lognormal",
    mean_length: Annotated[
        float | None, typer.Option(help="Mean tokens of a response.", show_default="a quarter of max_new_tokens")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt, which trainers read too.")] = 0,
    step_s: Annotated[float, typer.Option(help="Seconds that a step costs whatever its size.")] = 0.0,
    publish_s: Annotated[float, typer.Option(help="Seconds that publishing weights takes.")] = 0.0,
    score_s: Annotated[float, typer.Option(help="Seconds that scoring a response takes.")] = 0.0,
    steps: Annotated[int, typer.Option(help="Steps to look at.")] = 20,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a Perfetto timeline of each variant here.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """How long would a recipe take, synchronous and 1, 2 and 4 versions ahead? Computes nothing; takes seconds."""
    from tandem.launch.simulate import Question, simulate_recipe

    machines = {
        "engines": engines,
        "slots": slots,
        "tokens_per_s": tokens_per_s,
        "trainers": trainers,
        "train_tokens_per_s": train_tokens_per_s,
        "step_s": step_s,
        "publish_s": publish_s,
        "score_s": score_s,
    }
    question = Question(length_law, mean_length, prompt_tokens, steps, timeline)
    simulate_recipe(recipe, overrides or [], question, machines, Console())


@app.command()
def drill(
    recipe: Recipe,
    overrides: Overrides = None,
    fault: Annotated[list[str] | None, typer.Option(help="Only this one; several times.", show_default="all")] = None,
    limit_s: Annotated[float, typer.Option(help="Seconds that one run may take.")] = 1800.0,
    debug: Debug = False,
) -> None:
    """Run a recipe for a few steps with one real fault after the other: did it keep its promises? (1 if not.)"""
    from tandem.launch.drill.drill import drill as drill_recipe

    console = Console(highlight=False)
    raise typer.Exit(drill_recipe(recipe, overrides or [], only=fault or [], limit_s=limit_s, console=console))


@app.command(name="drill-run", hidden=True)
def drill_run(fault: str, recipe: Recipe, overrides: Overrides = None, debug: Debug = False) -> None:
    """One run of a drill: `tandem train` with a fault in it."""
    from tandem.launch.drill.drill import run_with

    raise typer.Exit(run_with(fault, recipe, overrides or []))


@app.command(name="import-config")
def import_config(
    file: Annotated[Path, typer.Argument(help="A PPO or GRPO config of NeMo-RL, beside what it inherits from.")],
    output: Annotated[Path | None, typer.Option(help="The recipe to write.", show_default="standard output")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that is there.")] = False,
    debug: Debug = False,
) -> None:
    """Say a NeMo-RL config in Tandem's keys: a recipe, and a table of what became of every key."""
    from tandem.launch.import_config import import_file

    raise typer.Exit(0 if import_file(file, output, overwrite) else 1)


def main() -> None:
    """Run a command. Whatever goes wrong ends in one message and an exit code: 2 for bad input, 1 for a failed run."""
    # On Intel CPUs MKL splits some sums by threads; strict reproducibility costs nothing measurable. Before torch.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    try:
        sys.exit(app(standalone_mode=False))  # typer returns the code of an early exit: 130 after Ctrl-C
    except Exception as error:
        sys.exit(explain(error))


def explain(error: Exception) -> int:
    """Say what went wrong, in one message; with --debug, raise it instead. Returns the exit code."""
    if "--debug" in sys.argv:
        raise error
    causes = leaves(error)
    if hasattr(error, "format_message"):  # a usage error of the command line itself
        complain(error.format_message())
        return 2
    for cause in causes:
        complain(str(cause) or type(cause).__name__)
    Console(stderr=True).print("(--debug shows the traceback)", style="dim")
    return 2 if all(isinstance(cause, ValueError) for cause in causes) else 1


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside a group of errors, each message once."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    flat = [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return list({str(leaf): leaf for leaf in flat}.values())


def complain(message: str) -> None:
    Console(stderr=True).print("error:", message, style="red", markup=False, highlight=False, soft_wrap=True)
