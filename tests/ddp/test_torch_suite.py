"""torch's own tests of DistributedDataParallel pass with dreamcomm's class in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

OURS = "dreamcomm.DistributedDataParallel"
SUITE = Path(__file__).parents[1] / "conformance" / "suite.py"

# These pass with torch's class, too. Left out are tests that ask for torch's messages, for an error
# where parameters are unused, for a second wrapper of a module or for fields of torch's logging
# data, and tests that show nearly what others show.
NAMES = (
    # Gradients are the averages that one process gets.
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_ddp_create_graph",
    "test_ddp_forward_backward_hook",
    "test_ddp_namedtuple",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_sink_noclone",
    "test_ddp_zero_output_features",
    "test_stateless_api_with_ddp",
    # Several backward passes make one step.
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_grads_same_across_ranks_with_no_sync",
    # A pass leaves parameters out.
    "test_ddp_shared_grad_acc_unused_params",
    "test_output_unused_in_loss_dict_module",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
    # Ranks have different numbers of inputs.
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_join_model_equivalence",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    # Buffers and first values come from rank 0, and some are left out.
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_ignore_params_arg",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_sync_module_states",
    # Hooks and optimizers of torch's work with the class.
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_hook_parity_post_localSGD",
    "test_ddp_hook_parity_powerSGD",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
)
MAKES_NONE = "test_all_reduce_sum"


@pytest.fixture(scope="module")
def outcomes(backend: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What came of each test in a world of two; a process of its own imports torch's suite."""
    file = tmp_path_factory.mktemp("suite") / "outcomes.json"
    options = [f"--backend={backend}", "--world=2", "--pretend-gpus", f"--data-parallel={OURS}"]
    options += [f"--only={name}" for name in (*NAMES, MAKES_NONE)]
    # timeout ends the ranks, too.
    command = ["timeout", "240", sys.executable, str(SUITE), *options, f"--json={file}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert file.exists(), done.stdout + done.stderr
    found: dict[str, dict[str, str]] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_torchs_test_passes(outcomes: dict[str, dict[str, str]], name: str) -> None:
    """Each rank has made the class: else the suite fails the test."""
    if name not in outcomes:
        pytest.skip(f"torch {torch.__version__} has no such test")
    assert outcomes[name]["result"] == "passed", outcomes[name]["why"]


def test_a_test_that_makes_none_fails(outcomes: dict[str, dict[str, str]]) -> None:
    """So that those above have made dreamcomm's class, and not torch's."""
    assert outcomes[MAKES_NONE]["result"] == "failed"
    assert outcomes[MAKES_NONE]["why"].endswith(f"the test has made no {OURS}")
