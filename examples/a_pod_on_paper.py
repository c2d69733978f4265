# %% [markdown]
# # A pod on paper
#
# `train.py --dry-run` compiles a training step for a slice of TPUs and prints the memory, work and
# communication per chip. The command requires the TPU compiler (`dlm_jax[tpu]`) but no TPU.

# %%
import importlib.util
import subprocess
import sys
from pathlib import Path

program = Path(sys.executable).with_name("dlm-train")
flags = ["--topology", "v5e:2x2", "--train.batch_size", "64"]
command = [program, "--config", "quickstart", "--dry-run", *flags]

# %%
if importlib.util.find_spec("libtpu") is None:
    print("libtpu is not installed; pip install 'dlm_jax[tpu]'")
else:
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
