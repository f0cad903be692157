"""Settings of the engines that generate, and of the road that weights take to them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import StringConstraints

from megarl.config.section import Section, setting

_DAY = 86_400.0
_ADDRESS = r"https?://[^\s/@?#]+"
_REFERENCE = r"^(env|file):.+$"


class GenerationSettings(Section):
    """The engines that generate."""

    engine: Literal["embedded", "sglang"] = setting(
        "embedded",
        "embedded: megarl's own, in torch; sglang: SGLang servers.",
        elsewhere="backend rollout_backend",
    )
    num_slots: int = setting(
        64,
        "Sequences that one engine works on at once.",
        ge=1,
        le=1_000_000,
        elsewhere="max_num_seqs max_running_requests",
    )
    num_servers: int = setting(
        0,
        "Server processes to start, over all machines. 0: embedded engines live inside the ranks; SGLang gets as many "
        "servers as the devices allow.",
        ge=0,
        le=100_000,
        elsewhere="rollout_num_engines num_engines",
    )
    urls: list[Annotated[str, StringConstraints(pattern=rf"^{_ADDRESS}$")]] = setting(
        [],
        "Servers that are already there, which megarl uses and does not start: http://HOST:PORT.",
        rule="a list of addresses like http://127.0.0.1:30000",
        elsewhere="sglang_urls server_urls base_urls",
    )
    tp_size: int = setting(
        1, "Devices of one SGLang server.", ge=1, le=4096, elsewhere="tensor_parallel_size rollout_num_gpus_per_engine"
    )
    colocated: bool = setting(
        True,
        "Servers share the trainer's devices, and give back weights and KV cache while it trains; false: they keep "
        "devices, or cores, of their own.",
        elsewhere="colocate free_cache_engine",
    )
    router: str | None = setting(
        None,
        "An sglang-router between megarl and the servers: start, or the address of one; null: none.",
        rule="start, an address like http://127.0.0.1:30000, or null",
        pattern=rf"^(start|{_ADDRESS})$",
    )
    python: str | None = setting(
        None, "Python interpreter that has SGLang installed; null: the one that runs megarl.", min_length=1
    )
    api_key: str | None = setting(
        None,
        "Key of the servers in urls. Started servers get a new one in every run.",
        rule="env:NAME, file:PATH or null",
        pattern=_REFERENCE,
    )
    admin_key: str | None = setting(
        None,
        "Key of their control routes; null: the same as api_key.",
        rule="env:NAME, file:PATH or null",
        pattern=_REFERENCE,
        elsewhere="admin_api_key",
    )
    start_timeout_seconds: float = setting(600.0, "Longest wait for a server to be ready.", gt=0, le=_DAY)
    request_timeout_seconds: float = setting(
        600.0, "Longest wait for one answer; then another server is asked.", gt=0, le=_DAY, elsewhere="request_timeout"
    )
    step_timeout_seconds: float = setting(
        7200.0, "Longest wait for all answers of a step; then the run ends.", gt=0, le=7 * _DAY
    )
    min_servers: int = setting(
        1, "With fewer servers that serve, or can be brought back, the run ends (exit code 69).", ge=1, le=100_000
    )
    max_restarts: int = setting(3, "How often one started server is started again.", ge=0, le=10_000)
    sglang: dict[str, Any] = setting(
        {}, "Further options of SGLang's server, by its own names (mem_fraction_static: 0.8)."
    )


class WeightsSettings(Section):
    """How new weights reach the engines."""

    transport: Literal["auto", "inprocess", "tensor", "broadcast", "disk"] = setting(
        "auto",
        "inprocess: engines inside the ranks; tensor: shared memory or CUDA IPC, to servers on the same machine; "
        "broadcast: a collective group with the servers; disk: files that both sides can read. auto: the first that "
        "fits.",
        elsewhere="update_weight_transfer_mode sync_method",
    )
    directory: str | None = setting(
        None, "Where disk puts the files, on a disk that all machines see; null: in the run's directory.", min_length=1
    )
