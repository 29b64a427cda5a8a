"""What holds for every script: it stands alone, it has the one order, and same name means same code."""

import ast
import difflib
import itertools
import re
import subprocess
import sys

import pytest
from helpers import ROOT, SCRIPTS

# what differs from script to script by design
DIFFERENT = {"Args", "RunState", "main", "PRESETS", "SPLIT", "check_args", "init_state"}
# one name in every script, the same argument names within a family, and a body of its own
CONCEPTS = {"encode", "contrastive_loss", "model_loss", "intrinsic_reward", "collect", "update", "learn", "learn_bonus",
            "learn_policy", "Rollout", "action_distribution"}  # fmt: skip
FAMILIES = {"SAC": r"\w+_sac_brax", "recurrent PPO": r"\w+_ppo_(rnn_)?craftax"}
# fields of Args to which the paper's tables give another number, or docstring, on Craftax
OF_CRAFTAX = {"env", "total_timesteps", "num_envs", "learning_rate", "agent_width", "gamma", "encoder_width",
              "representation_size", "gamma_cl", "first_offset", "logsumexp_penalty", "task_reward_coef",
              "intrinsic_coef"}  # fmt: skip
# those that ETD's paper, or a second family of environments in one file, changes
OF_ETD = {"env", "num_envs", "num_steps", "episode_length", "update_epochs", "learning_rate", "encoder_learning_rate",
          "max_grad_norm", "agent_width", "gamma", "gae_lambda", "gamma_cl", "logsumexp_penalty"}  # fmt: skip
# those that have more values where they are taken apart
OF_ABLATIONS = {"similarity", "reward_features"}
# the noisy TV, for which the paper has no table, has ETD's PPO, C-TeC as on Craftax, and fields of its own
OF_TV = {"env", "bonus", "total_timesteps", "num_steps", "episode_length", "learning_rate"}
TV_AS_ETD = {"update_epochs", "max_grad_norm", "agent_width", "gamma", "gae_lambda"}
TV_AS_CRAFTAX = {"encoder_width", "representation_size", "gamma_cl", "logsumexp_penalty"}
# the titles of the banner comments, in their order
BANNERS = ["arguments", "networks", "the method: .+", "SAC|PPO", "replay and rollout|rollout", "training",
           "initial state", "appendix", "devices", "coverage|achievements|coverage and achievements", "environments",
           "run folder and checkpoint", "pictures", "main"]  # fmt: skip
# a script that trains no network and has no checkpoint: titles of its own, no stages, and a parse_args without
# a preset and without --resume
STUDIES = {"toy_mdps": ["arguments", "the method: .+", "policies: .+", "the studies", "appendix", "environments",
                        "run folder", "pictures", "main"]}  # fmt: skip
OF_STUDIES = {"parse_args"}
STAGES = ("collect", "learn", "learn_bonus", "learn_policy")
LEARNING = [path for path in SCRIPTS if not path.stem.startswith("random") and path.stem not in STUDIES]
by_name = dict(ids=lambda path: path.name)


def last_line(path):
    """Where the last stage of an iteration must have ended."""
    special = {"etd_ppo": 600, "ctec_ablations_sac_brax": 650}
    return special.get(path.stem, 500 if path.stem.endswith(("craftax", "tv")) else 450)


def longest(path):
    """Lines of a whole script."""
    special = {"etd_ppo": 1350, "ctec_ablations_sac_brax": 1280}
    return special.get(path.stem, 900 if path.stem.endswith(("craftax", "tv", "mdps")) else 1150)


def top_level(path):
    """name -> syntax tree of each top-level definition."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def source(path, node):
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return "\n".join(path.read_text().splitlines()[first - 1 : node.end_lineno])


def sources(path):
    return {name: source(path, node) for name, node in top_level(path).items()}


def argument_names(node):
    """Of a function, as text; a class has none."""
    return ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else ""


def args_fields(path):
    """field -> (type, default, comment) of Args. A comment stands on the line of its field, or above it."""
    lines = path.read_text().splitlines()
    fields = {}
    for field in top_level(path)["Args"].body:
        if isinstance(field, ast.AnnAssign):
            comment = lines[field.end_lineno - 1][field.end_col_offset :].strip()
            if not comment:
                before = [line.strip() for line in lines[: field.lineno - 1]]
                comment = " ".join(
                    reversed(list(itertools.takewhile(lambda line: line.startswith("# "), before[::-1])))
                )
            assert comment.startswith("# "), f"{path.name}: Args.{field.target.id} has no comment"
            fields[field.target.id] = (ast.unparse(field.annotation), ast.unparse(field.value), comment)
    return fields


# -------------------------------------------------------------------------------------------- same name, same code
def differences(codes):
    """A diff for each name that has two texts in {script: {name: text}}."""
    seen = {}
    found = []
    for script, names in codes.items():
        for name, text in names.items():
            other, before = seen.setdefault(name, (script, text))
            lines = difflib.unified_diff(
                before.splitlines(), text.splitlines(), f"{other}: {name}", f"{script}: {name}", lineterm=""
            )
            if before != text:
                found.append("\n".join(lines))
    return found


def test_same_name_same_code():
    codes = {}
    for path in SCRIPTS:
        exempt = DIFFERENT | CONCEPTS | (OF_STUDIES if path.stem in STUDIES else set())
        codes[path.name] = {name: text for name, text in sources(path).items() if name not in exempt}
    found = differences(codes)
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_concept_has_the_same_arguments_within_a_family(family):
    members = [path for path in SCRIPTS if re.fullmatch(FAMILIES[family], path.stem)]
    codes = {}
    for path in members:
        nodes = top_level(path)
        codes[path.name] = {name: argument_names(nodes[name]) for name in CONCEPTS & nodes.keys()}
    assert len(members) > 1
    found = differences(codes)
    assert not found, "\n\n".join(found)


def test_a_difference_is_found():
    codes = {
        "a.py": {"loss": "def loss(x):\n    return x", "same": "1"},
        "b.py": {"loss": "def loss(x):\n    return -x", "same": "1"},
    }
    assert len(differences(codes)) == 1 and "-    return x" in differences(codes)[0]


def test_the_lists_are_no_longer_than_they_need_be():
    """Everything on them does differ somewhere, and the concepts exist."""
    everything = [sources(path) for path in SCRIPTS]
    for name in DIFFERENT | CONCEPTS | OF_STUDIES:
        texts = [names[name] for names in everything if name in names]
        assert len(set(texts)) > 1, f"{name} is the same wherever it is: take it off the list"
    on_brax = args_fields(ROOT / "ctec_sac_brax.py") | args_fields(ROOT / "apt_sac_brax.py")
    on_craftax = args_fields(ROOT / "ctec_ppo_rnn_craftax.py")
    of_etd = args_fields(ROOT / "etd_ppo.py")
    assert not [name for name in OF_CRAFTAX if on_craftax[name] == on_brax[name]]
    assert not [name for name in OF_ETD if of_etd[name] == (on_craftax | on_brax)[name]]
    of_ablations = args_fields(ROOT / "ctec_ablations_sac_brax.py")
    assert not [name for name in OF_ABLATIONS if of_ablations[name] == (of_etd | on_brax)[name]]
    of_tv = args_fields(ROOT / "ctec_ppo_noisy_tv.py")
    assert not [name for name in OF_TV if of_tv[name] in (on_craftax.get(name), on_brax.get(name), of_etd[name])]
    assert TV_AS_ETD <= OF_ETD and TV_AS_CRAFTAX <= OF_CRAFTAX


def special(path, name):
    """Whether a field of Args has its meaning on Craftax, of ETD, of the noisy TV, or of the ablations."""
    tv = path.stem.endswith("tv")
    on_craftax = name in (TV_AS_CRAFTAX if tv else OF_CRAFTAX if "craftax" in path.stem else ())
    of_etd = name in (TV_AS_ETD if tv else OF_ETD if "etd" in path.stem else ())
    return on_craftax, of_etd, tv and name in OF_TV, "ablations" in path.stem and name in OF_ABLATIONS


def test_same_argument_same_meaning():
    seen = {}
    for path in SCRIPTS:
        for name, field in args_fields(path).items():
            key = (name, *special(path, name))
            assert seen.setdefault(key, field) == field, f"{path.name}: Args.{name} is {field}, elsewhere {seen[key]}"


# ------------------------------------------------------------------------------------------------------- the order
@pytest.mark.parametrize("path", LEARNING, **by_name)
def test_a_learning_script_has_the_vocabulary(path):
    names = top_level(path).keys()
    assert {"gradient_update", "intrinsic_reward", "collect"} <= names
    assert {"learn"} <= names or {"learn_bonus", "learn_policy"} <= names
    assert {"contrastive_loss", "model_loss"} & names


@pytest.mark.parametrize("path", SCRIPTS, **by_name)
def test_banners_stand_in_the_one_order(path):
    order = STUDIES.get(path.stem, BANNERS)
    lines = path.read_text().splitlines()
    banners = {i: line for i, line in enumerate(lines, 1) if re.match("# ?[-=]{3}", line)}
    titles = [re.fullmatch("# [-=]{10,} (.+)", line).group(1) for line in banners.values()]
    places = []
    for title in titles:
        place = [i for i, pattern in enumerate(order) if re.fullmatch(pattern, title)]
        assert place, f"{title!r} is none of {order}"
        places += place
    assert places == sorted(places), titles
    if path in LEARNING or path.stem in STUDIES:
        assert {order[place] for place in places} == set(order)
    method = min(i for i, line in banners.items() if "the method: " in line)
    assert method < 180
    if path.stem not in STUDIES:
        stages = [top_level(path)[name] for name in STAGES if name in top_level(path)]
        assert max(stage.end_lineno for stage in stages) <= last_line(path)
    assert len(lines) <= longest(path)
    assert {len(line) for line in banners.values()} == {111}


@pytest.mark.parametrize("path", SCRIPTS, **by_name)
def test_one_statement_does_one_thing(path):
    """No a, b = x, y: several values packed into one assignment."""
    packed = [
        source(path, node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    ]  # fmt: skip
    assert not packed, "\n".join(packed)


@pytest.mark.parametrize("path", SCRIPTS, **by_name)
def test_the_docstring_tells_an_iteration_and_names_its_page(path):
    text = ast.get_docstring(ast.parse(path.read_text()))
    pseudocode = re.search(r"^One iteration:\n\n((?:    .+\n)+)\n", text, re.M)
    assert pseudocode and 2 <= pseudocode.group(1).count("\n") <= 12
    assert f"docs/{path.stem}.md" in text
    assert f"python {path.name} " in text


# ---------------------------------------------------------------------------------------------------- stands alone
def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("path", SCRIPTS, **by_name)
def test_script_stands_alone(path):
    tree = ast.parse(path.read_text())
    siblings = {other.stem for other in SCRIPTS}
    roots = {module.split(".")[0] for module in imported_modules(tree)}
    assert not roots & (siblings | {"pickle", "torch", "distrax", "gym", "tests", "helpers"})
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    owner = lambda node: getattr(node.value, "id", getattr(node.value, "attr", ""))  # args.x, self.x or self.args.x
    used = {node.attr for node in attributes if owner(node) in ("args", "self")}
    unread = set(args_fields(path)) - used
    assert not unread, f"Args fields that nothing reads: {unread}"
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not {getattr(node.func, "id", "") for node in calls} & {"eval", "exec"}


@pytest.mark.parametrize("path", SCRIPTS, **by_name)
def test_script_carries_its_requirements(path):
    text = path.read_text()
    block = re.search(r"# /// script\n(.*?)# ///", text, re.S).group(1)
    pins = set(re.findall(r'"([\w-]+==[\w.]+)"', block))
    assert pins <= set((ROOT / "requirements.txt").read_text().split())
    roots = {module.split(".")[0] for module in imported_modules(ast.parse(text))} - sys.stdlib_module_names
    packages = {{"PIL": "pillow"}.get(root, root) for root in roots}
    assert packages <= {pin.split("==")[0] for pin in pins}


@pytest.mark.parametrize("path", SCRIPTS, **by_name)
def test_import_runs_nothing(path, tmp_path):
    """Importing prints nothing, writes nothing and does not start a device."""
    code = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import {path.stem}
from jax._src import xla_bridge
assert not xla_bridge._backends"""
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())
