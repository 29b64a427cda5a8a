"""One small CPU set-up for all tests: the flags halve the time that XLA needs to compile a Brax step, and what one test
has compiled is there for the next, also in another process."""

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers of a session inherit its folder
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["WANDB_MODE"] = "offline"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # XLA warns at every program that it loads from the cache
for folder in ("benchmarks", "experiments", ""):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))

# submitit resets logging when it is imported, which closes absl's handler and with it the stderr that pytest captures:
# it has to come before whatever imports absl
with contextlib.suppress(ImportError):
    import submitit  # noqa: F401
