"""`tandem doctor` on a healthy machine, and on one with one thing broken at a time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tandem.config.load import load
from tandem.launch.doctor.machine import disk, loopback, open_files, shared_memory
from tandem.launch.doctor.packages import extra_finding, finding_of, gpus
from tandem.launch.doctor.wanted import extras_of

MIB, GIB = 1 << 20, 1 << 30
# Stand-ins for packages that take seconds to import: what the doctor says of the others is what is tested.
LIGHT = {
    "torch": "class version: cuda = None\nclass cuda:\n    is_available = staticmethod(lambda: False)\n",
    "transformers": "",
    "tensorboard": "",
    **dict.fromkeys(("ray", "transfer_queue", "datasets", "reasoning_gym", "matplotlib"), ""),
}


def doctor(
    folder: Path, *arguments: str, modules: dict[str, str] | None = None, shell: str = ""
) -> tuple[int, dict[str, str], str]:
    """Exit code, what is said of each thing with its fix, and all of it; under limits that a shell sets."""
    for name, text in (modules or {}).items():
        (folder / f"{name}.py").write_text(text)
    command = f'{shell} exec "$@"'
    done = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, "-m", "tandem", "doctor", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    things: dict[str, str] = {}
    thing = ""
    for line in done.stdout.splitlines():
        thing = thing if line.startswith(" ") else line[:19].strip()
        things[thing] = things.get(thing, "") + line
    return done.returncode, things, done.stdout + done.stderr


def test_a_healthy_machine_trains_a_step(tmp_path: Path):
    code, things, said = doctor(tmp_path, "quickstart")
    assert code == 0, said
    assert " ok " in things["one step"]
    assert "weight sync" in things["one step"]
    assert " ok " in things["torch"]
    assert not list(tmp_path.iterdir())  # the step's run was in a directory of its own


def test_a_step_that_fails_is_named_with_its_reason_and_how_to_see_more(tmp_path: Path):
    code, things, said = doctor(tmp_path, modules={name: text for name, text in LIGHT.items() if name != "torch"})
    assert code == 1, said
    assert " broken " in things["one step"]
    assert "AutoModelForCausalLM" in said or "cannot import name" in said
    assert "-> see what is above; all of it: tandem train quickstart" in things["one step"]


@pytest.mark.parametrize(
    ("module", "text", "says"),
    [
        ("safetensors", "raise ImportError('no libwhatever.so')", "cannot be imported: ImportError: no libwhatever.so"),
        ("jinja2", "import os\nos._exit(3)", "the process ended with 3"),
        ("numpy", "import sys\nsys.exit('bye')", "SystemExit: bye"),
    ],
)
def test_a_broken_package_is_named_with_its_fix_and_others_are_still_looked_at(
    tmp_path: Path, module: str, text: str, says: str
):
    code, things, said = doctor(tmp_path, "--no-run", modules=LIGHT | {module: text})
    assert code == 1, said
    assert " broken " in things[module]
    assert says in things[module]
    assert f"-> uv pip install --reinstall '{module}" in things[module]
    others = [name for name, line in things.items() if " broken " in line and not name.startswith("extra ")]
    assert others == [module], "an extra that imports it is broken with it"


def test_a_version_that_is_not_wanted_is_broken(tmp_path: Path):
    metadata = tmp_path / "pydantic-1.10.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: pydantic\nVersion: 1.10\n")
    code, things, said = doctor(tmp_path, "--no-run", modules=LIGHT)
    assert code == 1, said
    assert "1.10, wanted <3,>=2.9" in things["pydantic"]


def test_with_nothing_broken_the_code_is_0_and_the_step_may_be_left_out(tmp_path: Path):
    code, things, said = doctor(tmp_path, "--no-run", modules=LIGHT)
    assert code == 0, said
    assert "one step" not in things


def test_no_room_to_write_is_broken(tmp_path: Path):
    code, things, said = doctor(tmp_path, "--no-run", modules=LIGHT, shell="ulimit -f 1024;")
    assert code == 1, said
    assert "8 MiB cannot be written: File too large" in things["disk for runs"]
    assert "run_dir=PATH" in things["disk for runs"]


def test_a_tiny_number_of_open_files_is_broken(tmp_path: Path):
    code, things, said = doctor(tmp_path, "--no-run", modules=LIGHT, shell="ulimit -n 64;")
    assert code == 1, said
    assert " broken " in things["open files"]
    assert "nofile" in things["open files"]


def test_a_limit_of_files_that_can_be_raised_is_a_warning():
    assert open_files(1024, 1 << 20).state == "warning"
    assert "ulimit -n 4096" in open_files(1024, 1 << 20).fix
    assert open_files(1 << 20, 1 << 20).state == "ok"


def test_shared_memory_and_disk_by_their_size(tmp_path: Path):
    assert [shared_memory(size).state for size in (16 * MIB, 64 * MIB, 4 * GIB)] == ["broken", "warning", "ok"]
    assert "--shm-size" in shared_memory(64 * MIB).fix
    assert disk("disk", tmp_path / "not" / "yet" / "there").state in ("ok", "warning")


def test_loopback_that_is_closed_is_broken(monkeypatch: pytest.MonkeyPatch):
    assert loopback().state == "ok"

    def refuse(*_: object, **__: object) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert loopback().state == "broken"
    assert "Operation not permitted" in loopback().says


def test_an_extra_is_needed_where_the_recipe_wants_it():
    nowhere = Requirement("no-such-package>=1")
    assert extra_finding("magic", nowhere, needed=False).state == "absent"
    wanted = extra_finding("magic", nowhere, needed=True)
    assert wanted.state == "broken"
    assert wanted.fix == "uv sync --extra magic in a checkout, else uv pip install 'tandem-rl[magic]'"
    assert extras_of(load("quickstart").config) == set()
    assert extras_of(load("quickstart", ["cluster.launch=ray"]).config) == {"ray"}
    assert extras_of(load("quickstart_vllm", ["data_plane.name=transfer_queue"]).config) == {
        "vllm",
        "ray",
        "transferqueue",
    }


def test_a_missing_package_is_broken():
    assert finding_of(Requirement("no-such-package>=1"), None, "install it").says == "missing"


def test_gpus_are_listed_and_a_full_one_is_a_warning():
    half = gpus({"cuda": "13.0", "error": "", "there": [("H200", 140 * GIB, 10 * GIB)]})
    assert half.state == "warning"
    assert "H200, 140.0 GiB, 10.0 free" in half.says
    assert gpus({"cuda": "13.0", "error": "", "there": [("H200", 140 * GIB, 139 * GIB)]}).state == "ok"
