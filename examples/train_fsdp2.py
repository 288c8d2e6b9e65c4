"""Train the demo's byte transformer with FSDP2: on CPU cores through gloo, or on GPUs through NCCL.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py --checkpoint runs/fsdp2
    torchrun --nproc-per-node 1 examples/train_fsdp2.py --checkpoint runs/fsdp2 --steps 120 --resume

The second line goes on from the first one's checkpoint on another number of processes. The weights are BF16 with no
FP32 copy; the optimizer needs to be told nothing of the sharding. The text is the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from luminav import LuminaV, param_groups
from luminav.cli.demo.data import Corpus, load_corpus
from luminav.cli.demo.model import ByteTransformer, ModelShape, native_compute_dtype

SHAPE = ModelShape(width=128, layers=4, heads=4, context=128)
SEED = 1337
BATCH_SIZE = 12  # windows in a step, over all ranks: 1, 2, 3, 4, 6 or 12 of them
VALIDATION_BYTES = 16 * 1024


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps in all, those before a resume included")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--data", type=Path, help="text file, or folder of text files")
    parser.add_argument("--checkpoint", type=Path, help="folder to save under at the end, and to resume from")
    parser.add_argument("--resume", action="store_true", help="go on from the latest under --checkpoint")
    return parser.parse_args()


def start_process_group() -> torch.device:
    """One process per GPU where there are GPUs, else on the CPU. torchrun sets the environment."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def sharded_model(device: torch.device) -> ByteTransformer:
    """The model in BF16, each block a unit of its own; gradients are averaged over the ranks in FP32."""
    model = ByteTransformer(SHAPE, SEED).to(device, torch.bfloat16)
    model.compute_dtype = native_compute_dtype(torch.bfloat16, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def save(folder: Path, model: ByteTransformer, optimizer: LuminaV, step: int) -> None:
    """Write a checkpoint: each rank its own parts."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=folder / str(step))


def load(folder: Path, model: ByteTransformer, optimizer: LuminaV) -> int:
    """Read the latest checkpoint, of any number of ranks, and return its step."""
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "step": 0}
    latest = max((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    dcp.load(saved, checkpoint_id=latest)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return saved["step"]


def mean_over_ranks(value: Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def validation_loss(model: ByteTransformer, corpus: Corpus, device: torch.device) -> float:
    """Nats per byte of held-out text; every rank reads all of it, since FSDP gathers the weights on all at once."""
    windows = corpus.validation(VALIDATION_BYTES).to(device)
    return sum(model.loss(part).item() * len(part) for part in windows.split(BATCH_SIZE)) / len(windows)


def main() -> None:
    options = arguments()
    device = start_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    if BATCH_SIZE % world:
        raise SystemExit(f"the batch of {BATCH_SIZE} windows cannot be split over {world} ranks.")
    corpus = load_corpus(options.data, SHAPE.context)
    model = sharded_model(device)
    optimizer = LuminaV(param_groups(model), lr=options.lr, seed=SEED)
    first = load(options.checkpoint, model, optimizer) if options.resume else 0
    if rank == 0:
        print(f"{world} ranks on {device.type}, from step {first}", flush=True)
    for step in range(first, options.steps):
        windows = corpus.batch(SEED, step, BATCH_SIZE).chunk(world)[rank].to(device)
        loss = model.loss(windows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            mean = mean_over_ranks(loss)
            if rank == 0:
                print(f"step {step + 1}: training loss {mean:.3f}", flush=True)
    loss = validation_loss(model, corpus, device)
    if rank == 0:
        print(f"step {options.steps}: validation loss {loss:.3f}", flush=True)
    if options.checkpoint:
        save(options.checkpoint, model, optimizer, options.steps)
    dist.barrier()  # gloo aborts a rank whose peers leave while it still talks to them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
