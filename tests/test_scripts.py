"""What holds for every script at the top level: it stands alone, and same name means same code."""
import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(ROOT.glob("*.py"))
# what differs from script to script by design
DIFFERENT = {"Args", "TrainState", "train_iteration", "main", "PRESETS", "update", "init_state", "PAPER", "METRICS"}
# fields of Args to which the paper's tables give another number, or docstring, on Craftax
OF_CRAFTAX = {"env", "total_timesteps", "num_envs", "learning_rate", "agent_width", "gamma", "encoder_width", "representation_size", "gamma_cl", "logsumexp_penalty"}
# those that ETD's paper, or a second family of environments in one file, changes
OF_ETD = {"env", "num_steps", "episode_length", "update_epochs", "learning_rate", "max_grad_norm", "agent_width", "gamma", "gae_lambda", "gamma_cl", "logsumexp_penalty"}


def top_level(path):
    """name -> source of each top-level definition."""
    text, found = path.read_text(), {}
    for node in ast.parse(text).body:
        names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        start = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])
        for name in names:
            found[name] = "\n".join(text.splitlines()[start - 1 : node.end_lineno])
    return found


def args_fields(path):
    """field -> (type, default, docstring) of Args."""
    body = next(node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "Args").body
    fields = {}
    for field, doc in zip(body, body[1:]):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(doc, ast.Expr), f"{path.name}: Args.{field.target.id} has no docstring"
            fields[field.target.id] = ast.unparse(field.annotation), ast.unparse(field.value), doc.value.value
    return fields


def differences(codes):
    """Same name, other code: a diff for each name in {script: {name: source}}."""
    seen, found = {}, []
    for script, names in codes.items():
        for name, source in names.items():
            if name in DIFFERENT or name.startswith("__"):
                continue
            other, before = seen.setdefault(name, (script, source))
            if before != source:
                found.append("\n".join(difflib.unified_diff(before.splitlines(), source.splitlines(), f"{other}: {name}", f"{script}: {name}", lineterm="")))
    return found


def test_same_name_same_code():
    found = differences({path.name: top_level(path) for path in SCRIPTS})
    assert not found, "\n\n".join(found)


def test_a_difference_is_found():
    codes = {"a.py": {"loss": "def loss(x):\n    return x"}, "b.py": {"loss": "def loss(x):\n    return -x", "main": "1"}, "c.py": {"main": "2"}}
    assert len(differences(codes)) == 1 and "-    return x" in differences(codes)[0]


def test_same_argument_same_meaning():
    seen = {}
    for path in SCRIPTS:
        for name, field in args_fields(path).items():
            key = (name, "craftax" in path.name and name in OF_CRAFTAX, "etd" in path.name and name in OF_ETD)
            assert seen.setdefault(key, field) == field, f"{path.name}: Args.{name} is {field}, elsewhere {seen[key]}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_stands_alone(path):
    tree = ast.parse(path.read_text())
    siblings = {other.stem for other in SCRIPTS}
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            assert module.split(".")[0] not in siblings | {"pickle", "torch", "distrax", "gym", "tests"}, module
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("args", "self")}
    unread = set(args_fields(path)) - used
    assert not unread, f"Args fields that nothing reads: {unread}"
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("eval", "exec")]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_carries_its_requirements(path):
    block = re.search(r"# /// script\n(.*?)# ///", path.read_text(), re.S).group(1)
    pins = set(re.findall(r'"([\w-]+==[\w.]+)"', block))
    assert pins and pins <= set((ROOT / "requirements.txt").read_text().split())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_import_runs_nothing(path, tmp_path):
    """Importing prints nothing, writes nothing and does not start a device."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {path.stem}; from jax._src import xla_bridge; assert not xla_bridge._backends"
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(tmp_path.iterdir())
