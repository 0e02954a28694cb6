"""accelerate's ParallelismConfig with two replicas of shards over two ranks trains as one process
does.
"""

from typing import Any

from tests.hf.trainer_runs import AUTO, TWO_EPOCHS, assert_trains_as, run_plain, run_unmodified
from tests.releases import needs


def job(rows: int, **arguments: Any) -> dict[str, Any]:
    own = {"per_device_train_batch_size": rows}
    return {"model": "llama", "arguments": TWO_EPOCHS | own | arguments}


@needs("accelerate", "1.12", "its ParallelismConfig does not go with DeepSpeed")
def test_the_mesh_of_accelerate_is_the_engines(tmp_path):
    stage_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
    of_replicas = job(1, deepspeed={**AUTO, "zero_optimization": stage_3}) | {"replicas": 2}
    (report,) = run_unmodified([of_replicas], tmp_path / "shared", nproc=4)
    (plain,) = run_plain([job(4, use_cpu=True)], tmp_path / "plain")
    assert_trains_as(report, plain, ranks=4)
    assert 0.5 <= report["held"] < 0.55, "with paddings"
