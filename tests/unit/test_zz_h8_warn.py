def test_engine(tiny_vlm):
    import torch
    from trigon.models.load import load_processors, load_model
    from trigon.rollout.vllm import VllmEngine
    p = load_processors(str(tiny_vlm))
    m = load_model(str(tiny_vlm), dtype=torch.float32, device="cpu", trust_remote_code=False, override_config={})
    import inspect; print(inspect.signature(VllmEngine.__init__))
    e = VllmEngine(model_path=str(tiny_vlm), processors=p, device="cpu", dtype=torch.float32, max_model_len=256, max_num_batched_tokens=1024, gpu_memory_utilization=0.5, enforce_eager=True, enable_chunked_prefill=True, enable_prefix_caching=True, limit_images=2, seed=0, trust_remote_code=False, override_config={}, skip_special_tokens=True, disable_log_stats=True)
def test_datasets(tmp_path):
    import datasets
    d = datasets.Dataset.from_dict({"a":[1,2]}); d.to_parquet(str(tmp_path/"x.parquet"))
    assert len(datasets.load_dataset("parquet", data_files=str(tmp_path/"x.parquet"), split="train"))==2
def test_tb(tmp_path):
    from torch.utils.tensorboard import SummaryWriter
    w=SummaryWriter(str(tmp_path)); w.add_scalar("a",1,1); w.close()
def test_mpl():
    import matplotlib.pyplot
def test_mathruler():
    from mathruler.grader import grade_answer
    assert grade_answer("1/2","\\frac{1}{2}")
