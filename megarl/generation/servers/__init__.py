"""Server processes that a run starts: engines and, if asked for, a router.

`processes` starts, watches and ends them; `sglang_args` says with which options; `model_directory` writes the files
that SGLang reads; `router` puts one address in front. `tied`, `run_sglang` and `run_router` are executed by path.
"""
