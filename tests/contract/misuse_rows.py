"""Bad configurations and misuses, each with two words of its message and a suggestion of the message that then runs."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    PipelineGradientCheckpointConfig,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer

LEFT_OUT = object()  # a value of a suggestion: the option is left out
RECOMPUTED = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
RECOMPUTED_MLP = replace(RECOMPUTED, recompute_modules=("mlp",))
LLAMA = ModelChoice(model_type="llama", num_layers=2)


@dataclass(kw_only=True)
class Script:
    """A script of a user: it boosts a model and trains a step.

    Args:
        options: of the plugin.
        plugin: its class.
        choice: the model.
        model, optimizer: other ones than that of `choice` and AdamW, made by functions.
        data: the batches, made from the rank.
        train: what is called after boost, with this script; None trains by `execute_pipeline` or `model(**batch)`.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    plugin: Callable[..., Any] = HybridParallelPlugin
    choice: ModelChoice = LLAMA
    model: Callable[[], nn.Module] | None = None
    optimizer: Callable[[nn.Module], Any] = make_optimizer
    criterion: Any = loss_of
    batch: Callable[[dict[str, Tensor]], Any] = dict
    train: Callable[["Run"], Any] | None = None

    def run(self) -> None:
        """Train a step on this rank."""
        options = {name: value for name, value in self.options.items() if value is not LEFT_OUT}
        if self.plugin in (HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin):
            options = {"precision": "fp32"} | options
        booster = Booster(plugin=self.plugin(**options))
        model: Any = self.choice.build() if self.model is None else self.model()
        model, optimizer, *_ = booster.boost(model, self.optimizer(model))
        batch = self.batch(make_batch(self.choice, num_samples=4, seed=0))
        (self.train or step)(Run(self, booster, model, optimizer, batch))


class Run(NamedTuple):
    """A script after boost."""

    script: Script
    booster: Booster
    model: Any
    optimizer: Any
    batch: Any

    def pipeline(self, data: Any = None, **arguments: Any) -> Any:
        """Call `execute_pipeline` with these arguments and the script's others."""
        data = iter([self.batch]) if data is None else data
        usual = {"model": self.model, "criterion": self.script.criterion, "optimizer": self.optimizer}
        return self.booster.execute_pipeline(data, **(usual | arguments))

    def backward(self, loss: Any = None, optimizer: Any = None) -> None:
        """Call `booster.backward` with the model's loss, or with another."""
        loss = self.model(**self.batch).loss if loss is None else loss
        self.booster.backward(loss, self.optimizer if optimizer is None else optimizer)


def step(run: Run) -> None:
    """Train a step in the way of the plugin."""
    if run.script.plugin in (HybridParallelPlugin, LowLevelZeroPlugin):
        run.pipeline()
    else:
        run.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


@dataclass(kw_only=True)
class Misuse:
    """A script that is refused, and the script of the message's suggestion.

    Args:
        words: two parts of the message.
        wrong: fields of the refused script.
        right: fields that the suggestion changes.

    """

    words: tuple[str, str]
    wrong: dict[str, Any]
    right: dict[str, Any]

    def message(self) -> str:
        """Return the error of the refused script, on one rank."""
        try:
            Script(**self.wrong).run()
        except (TypeError, ValueError, RuntimeError, ImportError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was refused"

    def suggested(self) -> str:
        """Run the suggestion on one rank; return its error, empty if it runs."""
        try:
            Script(**{**self.wrong, **self.right}).run()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


def options(first: str, second: str, right: dict[str, Any], **wrong: Any) -> Misuse:
    """Make a row of HybridParallelPlugin's options; `right` are those that the suggestion changes."""
    return of_plugin(HybridParallelPlugin, first, second, right, **wrong)


def of_plugin(plugin: Any, first: str, second: str, right: dict[str, Any], **wrong: Any) -> Misuse:
    """Make a row of a plugin's options."""
    wrong_script, right_script = {"plugin": plugin, "options": wrong}, {"options": {**wrong, **right}}
    return Misuse(words=(first, second), wrong=wrong_script, right=right_script)


OUT = LEFT_OUT
PP2 = {"pp_size": 2, "num_microbatches": 2}
SEQ = {"enable_sequence_parallelism": True}
# fmt: off
OPTIONS = {
    # Sizes.
    "tp and the world": options("tp_size=3", "one of [1, 2]", {"tp_size": 2}, tp_size=3),
    "tp of zero": options("tp_size=0", "at least 1", {"tp_size": 1}, tp_size=0),
    "tp as text": options("tp_size='2'", "an integer", {"tp_size": 2}, tp_size="2"),
    "pp of a fraction": options("pp_size=1.5", "an integer", {"pp_size": 1}, pp_size=1.5),
    "dp and the world": options("dp_size=4", "use dp_size=2", {"dp_size": 2}, dp_size=4),
    "wp beside tp": options("wp_size=2", "one of wp_size=[1]", {"wp_size": 1}, tp_size=2, wp_size=2),
    "sp without sequences": options("sp_size=2", "give both, or none",
        SEQ | {"sequence_parallelism_mode": "all_to_all"}, sp_size=2),
    "zero_size": options("zero_size=3", "use one of 1, 2", {"zero_size": 2}, zero_size=3, zero_stage=1),
    # Pipelines.
    "stages without microbatches": options("pp_size=2", "needs num_microbatches", {"num_microbatches": 2}, pp_size=2),
    "microbatches twice": options("num_microbatches=2 and microbatch_size=2", "give one of them",
        {"microbatch_size": OUT}, num_microbatches=2, microbatch_size=2),
    "no microbatch": options("num_microbatches=0", "at least 1", {"num_microbatches": 1}, num_microbatches=0),
    "more microbatches than samples": options("num_microbatches=8", "at most that many microbatches",
        {"num_microbatches": 4}, num_microbatches=8),
    "a schedule of another name": options("no schedule '1b1f'", "use one of 'gpipe', '1f1b'", {"pp_style": "1f1b"},
        **PP2, pp_style="1b1f"),
    "chunks of 1f1b": options("num_model_chunks=2", "1 stage per rank", {"num_model_chunks": 1}, **PP2,
        num_model_chunks=2),
    "layers of stages": options("num_layers_per_stage=[0, 2]", "positive integers", {"num_layers_per_stage": [1, 1]},
        **PP2, num_layers_per_stage=[0, 2]),
    "layers of three stages": options("num_layers_per_stage=[1, 1, 1]", "one for each of 2 stages",
        {"num_layers_per_stage": [1, 1]}, **PP2, num_layers_per_stage=[1, 1, 1]),
    "other layers in all": options("num_layers_per_stage=[2, 1]", "use [1, 1]", {"num_layers_per_stage": [1, 1]},
        **PP2, num_layers_per_stage=[2, 1]),
    "a schedule without all ranks": options("pp_style", "the schedule has no backward", {"pp_style": "1f1b"}, **PP2,
        pp_style=[[]]),
    "zb-h1 compiled": options("pp_style='zbh1'", "leave compile_layers out", {"compile_layers": OUT}, **PP2,
        pp_style="zbh1", compile_layers=True),
    # ZeRO, precision and gradients.
    "ZeRO-3": options("zero_stage=3", "use TorchFSDPPlugin", {"zero_stage": 2}, zero_stage=3),
    "an unknown precision": options("precision='fp8'", "one of 'fp32', 'bf16'", {"precision": "bf16"},
        precision="fp8"),
    "the precision as a dtype": options("precision=torch.bfloat16", "one of 'fp32', 'bf16'", {"precision": "bf16"},
        precision=torch.bfloat16),
    "gathering that overlaps nothing": options("overlap_allgather=True", "use zero_stage 1 or 2", {"zero_stage": 1},
        overlap_allgather=True),
    "a norm that is no number": options("max_norm=nan", "at least 0", {"max_norm": 1.0}, max_norm=float("nan")),
    "a negative norm": options("max_norm=-1.0", "use 0 for no clipping", {"max_norm": 0.0}, max_norm=-1.0),
    "buckets without elements": options("zero_bucket_size_in_m=0.0", "one element", {"zero_bucket_size_in_m": 12.0},
        zero_bucket_size_in_m=0.0),
    "an unknown format of messages": options("communication_dtype='int8'", "'bf16'", {"communication_dtype": "bf16"},
        communication_dtype="int8"),
    "no accumulation": options("gradient_accumulation_steps=0", "at least 1", {"gradient_accumulation_steps": 1},
        gradient_accumulation_steps=0),
    "an unknown loss": options("loss_reduction='mean'", "'global'", {"loss_reduction": "global"},
        loss_reduction="mean"),
    "a loss scale of zero": options("initial_scale=0.0", "min_scale=1.0", {"initial_scale": 1.0}, precision="fp16",
        initial_scale=0.0),
    "a backoff that grows": options("backoff_factor=2.0", "between 0 and 1", {"backoff_factor": 0.5},
        precision="fp16", backoff_factor=2.0),
    "offloading as text": options("cpu_offload='yes'", "True or False", {"cpu_offload": True}, cpu_offload="yes"),
    "comparing never": options("check_every=0", "at least 1", {"check_every": 100}, check_every=0),
    # Sequences.
    "sequences over tp without tp": options("sequence_parallelism_mode='split_gather'", "tp_size is 1: use 2 or more",
        {"tp_size": 2}, **SEQ, sequence_parallelism_mode="split_gather"),
    "an unknown mode": options("sequence_parallelism_mode='gather'", "one of 'split_gather'",
        {"sequence_parallelism_mode": "split_gather"}, **SEQ, tp_size=2, sequence_parallelism_mode="gather"),
    "sp over the tensor axis": options("sp_size=2", "leave sp_size out", {"sp_size": OUT, "tp_size": 2}, **SEQ,
        sequence_parallelism_mode="split_gather", sp_size=2),
    "overlap without sequences": options("enable_sequence_overlap=True", "give both, or none",
        {"enable_sequence_overlap": OUT}, enable_sequence_overlap=True),
    "a ring without a ring": options("inner_ring_size=2", "is for sequence_parallelism_mode='ring_attn'",
        {"inner_ring_size": OUT}, **SEQ, sp_size=2, sequence_parallelism_mode="all_to_all", inner_ring_size=2),
    "a ring within a ring": options("inner_ring_size=3", "divides sp_size=2", {"inner_ring_size": OUT}, **SEQ,
        sp_size=2, sequence_parallelism_mode="ring_attn", inner_ring_size=3),
    # Recomputation and kernels.
    "offloading nothing": options("activation_offload=True", "gradient_checkpointing_ratio=1.0",
        {"gradient_checkpoint_config": RECOMPUTED}, activation_offload=True),
    "recomputation as True": options("gradient_checkpoint_config=True", "PipelineGradientCheckpointConfig(",
        {"gradient_checkpoint_config": RECOMPUTED}, gradient_checkpoint_config=True),
    "recomputed modules compiled": options("recompute_modules=('mlp',)", "with compile_layers=True",
        {"compile_layers": OUT}, compile_layers=True, gradient_checkpoint_config=RECOMPUTED_MLP),
    "compiled with overlapped gathering": options("compile_layers=True", "Leave one of them out",
        {"compile_layers": OUT}, compile_layers=True, overlap_allgather=True, zero_stage=1),
    "a package that is missing": options("package xformers", "enable_flash_attention='sdpa'",
        {"enable_xformers": OUT}, enable_xformers=True),
    "a policy as text": options("custom_policy is 'llama'", "leave it out", {"custom_policy": OUT},
        custom_policy="llama"),
    # ColossalAI's, DeepSpeed's and unknown names.
    "a misspelt size": options("argument 'tp'", "did you mean tp_size", {"tp": OUT, "tp_size": 2}, tp=2),
    "DeepSpeed's name": options("argument 'zero'", "or zero_stage", {"zero": OUT, "zero_stage": 1}, zero=1),
    "micro_batches": options("'num_micro_batches'", "did you mean num_microbatches", {"num_micro_batches": OUT,
        "num_microbatches": 2}, num_micro_batches=2),
    "fp8 of ColossalAI": options("use_fp8=True", "use precision='bf16'", {"use_fp8": OUT, "precision": "bf16"},
        use_fp8=True),
    "fp8 messages of ColossalAI": options("fp8_communication=True", "leave it out", {"fp8_communication": OUT},
        fp8_communication=True),
    # Other plugins.
    "zero_stage of LowLevelZeroPlugin": of_plugin(LowLevelZeroPlugin, "argument 'zero_stage'", "did you mean stage",
        {"zero_stage": OUT, "stage": 2}, zero_stage=2),
    "stage 3 of LowLevelZeroPlugin": of_plugin(LowLevelZeroPlugin, "stage=3", "stage 0, 1 or 2", {"stage": 2},
        stage=3),
    "buckets of LowLevelZeroPlugin": of_plugin(LowLevelZeroPlugin, "reduce_bucket_size_in_m=-1", "one element",
        {"reduce_bucket_size_in_m": 12}, reduce_bucket_size_in_m=-1),
    "shards of FSDP": of_plugin(TorchFSDPPlugin, "shard_size=3", "use one of [2]", {"shard_size": 2}, shard_size=3),
    "precision of FSDP": of_plugin(TorchFSDPPlugin, "precision='fp8'", "one of 'fp32', 'bf16'", {"precision": "bf16"},
        precision="fp8"),
    "resharding of FSDP": of_plugin(TorchFSDPPlugin, "reshard_after_forward=2", "True or False",
        {"reshard_after_forward": False}, reshard_after_forward=2),
    "offload of FSDP": of_plugin(TorchFSDPPlugin, "argument 'offload'", "did you mean cpu_offload", {"offload": OUT,
        "cpu_offload": True}, offload=True),
    "buckets of DDP": of_plugin(TorchDDPPlugin, "bucket_cap_mb=-1", "above 0", {"bucket_cap_mb": 25},
        bucket_cap_mb=-1),
    "a static graph as text": of_plugin(TorchDDPPlugin, "static_graph='no'", "True or False", {"static_graph": True},
        static_graph="no"),
}
# fmt: on


def choice(model_type: str, num_layers: int = 2, **settings: Any) -> ModelChoice:
    return ModelChoice(model_type=model_type, num_layers=num_layers, settings=tuple(settings.items()))


def model(first: str, second: str, wrong: dict[str, Any], right: dict[str, Any], **options: Any) -> Misuse:
    """Make a row of other fields of the script; `options` are those of the plugin."""
    return Misuse(words=(first, second), wrong={"options": options, **wrong}, right=right)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = make_optimizer(model)
    model(**make_batch(LLAMA, num_samples=2, seed=0)).loss.backward()
    optimizer.step()
    return optimizer


def of_another_model(model: nn.Module) -> torch.optim.Optimizer:
    return make_optimizer(LLAMA.build())


def with_hook() -> nn.Module:
    model: Any = LLAMA.build()
    model.get_input_embeddings().register_forward_hook(lambda *_: None)
    return model


# A model that transformers does not have.
SEQUENTIAL = {"model": lambda: nn.Sequential(nn.Linear(4, 4)), "train": lambda *_: None}
MODES = {"sequence_parallelism_mode": "all_to_all", "sp_size": 2}
# fmt: off
MODELS = {
    "more stages than layers": model("1 layers and the pipeline 2 stages", "at most 1 stages",
        {"choice": choice("llama", 1)}, {"options": {"pp_size": 1}}, **PP2),
    "a width that tp does not divide": model("mlp.gate_proj (and 3 more like it): 25 entries", "one of [1, 5, 25]",
        {"choice": choice("llama", intermediate_size=25)}, {"options": {}}, tp_size=2),
    "layers left out at random": model("layerdrop=0.1", "set it to 0", {"choice": choice("opt", layerdrop=0.1)},
        {"choice": choice("opt", layerdrop=0.0)}, **PP2),
    "layers that cannot be recomputed": model("AlbertLayerGroup cannot be recomputed",
        "leave gradient_checkpoint_config out", {"choice": choice("albert")}, {"options": PP2}, **PP2,
        gradient_checkpoint_config=RECOMPUTED),
    "recomputed modules that no layer has": model("no layer has a 'feed_forward'",
        "use one or more of self_attn, mlp", {}, {"options": {"gradient_checkpoint_config": RECOMPUTED_MLP}},
        gradient_checkpoint_config=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0,
        recompute_modules=("feed_forward",))),
    "rings of a model's own attention": model("sequence_parallelism_mode='ring_attn'",
        "use another sequence_parallelism_mode", {"choice": choice("bloom")}, {"options": SEQ | {"tp_size": 2,
        "sequence_parallelism_mode": "split_gather"}}, **SEQ, sp_size=2, sequence_parallelism_mode="ring_attn"),
    "all-to-all with relative positions": model("cross-attention", "leave enable_sequence_parallelism out",
        {"choice": choice("t5")}, {"options": {}}, **SEQ, **MODES),
    "tp without a table": model("no split of a XGLMForCausalLM gives", "leave tp_size at 1", {"choice": choice("xglm")},
        {"options": {}}, tp_size=2),
    "sequences of a state space": model("of this MambaForCausalLM departs", "leave enable_sequence_parallelism out",
        {"choice": choice("mamba")}, {"options": {}}, **SEQ, **MODES),
    "stages without a plan": model("no pipeline stages of a FunnelForMaskedLM", "Use pp_size=1",
        {"choice": choice("funnel")}, {"options": {}}, **PP2),
    "products of parts": model("slow_but_exact=True", "use slow_but_exact=False", {"choice": choice("bloom",
        slow_but_exact=True)}, {"choice": choice("bloom", slow_but_exact=False)}, tp_size=2),
    "experts of a dense model": model("ep_size=2 distributes the experts", "use ep_size=1", {},
        {"options": {"ep_size": 1}}, ep_size=2),
    "experts and the world": model("ep_size=3", "one of ep_size=[1, 2]", {"choice": choice("mixtral")},
        {"options": {"ep_size": 2}}, ep_size=3),
    "a hook before boost": model("this Embedding has hooks", "after the model is sharded", {"model": with_hook},
        {"model": None}, tp_size=2),
    "an optimizer that stepped": model("AdamW already has state", "boost before the first step",
        {"optimizer": stepped}, {"optimizer": make_optimizer}),
    "an optimizer of another model": model("parameters are not in the model", "build it on model.parameters()",
        {"optimizer": of_another_model}, {"optimizer": make_optimizer}),
    "an optimizer that needs a closure": model("LBFGS could not be tried", "such as torch.optim's",
        {"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, {"optimizer": make_optimizer}),
    "no optimizer at all": model("optimizer='adamw'", "give a torch optimizer", {"optimizer": lambda m: "adamw"},
        {"optimizer": make_optimizer}),
    "stages of all hidden states": model("output_hidden_states=True", "use pp_size=1", {"choice": choice("llama",
        output_hidden_states=True)}, {"options": {}}, **PP2),
    "tp of a module of one's own": model("a Sequential has no config", "leave tp_size and pp_size at 1", SEQUENTIAL,
        {"options": {}}, tp_size=2),
}
# fmt: on

Train = Callable[[Run], Any]


def call(first: str, second: str, wrong: Train, right: Train | None = None, **options: Any) -> Misuse:
    """Make a row of a call after boost; without `right` the suggestion is the ordinary step."""
    plugin = options.pop("plugin", HybridParallelPlugin)
    script = {"plugin": plugin, "options": options, "train": wrong}
    return Misuse(words=(first, second), wrong=script, right={"train": right})


def criterion(first: str, second: str, wrong: Any, right: Any = loss_of) -> Misuse:
    script = {"criterion": wrong, "options": {"num_microbatches": 2}}
    return Misuse(words=(first, second), wrong=script, right={"criterion": right})


def batch(first: str, second: str, wrong: Any, right: Any = dict, **options: Any) -> Misuse:
    script = {"batch": wrong, "options": {"num_microbatches": 2, **options}, "criterion": None}
    return Misuse(words=(first, second), wrong=script, right={"batch": right})


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda batch: {key: value for key, value in batch.items() if key != name}


def dividing(number: Any) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    return lambda batch: batch | {"num_items_in_batch": number}


def clip(run: Run, by: Callable[[Run], Any]) -> None:
    run.pipeline()
    by(run)
    run.optimizer.step()


def weighing_once(outputs: Any, inputs: Any) -> Any:
    """Return a weight for one of two microbatches."""
    return (outputs.loss, 1) if inputs["input_ids"][0, 0] == FIRST_TOKEN else outputs.loss


FIRST_TOKEN = make_batch(LLAMA, num_samples=4, seed=0)["input_ids"][0, 0]
# fmt: off
CALLS = {
    "a list in place of an iterator": call("takes an iterator, not a list", "give iter(dataloader)",
        lambda run: run.pipeline([run.batch])),
    "no optimizer while gradients are on": call("needs the optimizer", "evaluate under no_grad()",
        lambda run: run.pipeline(optimizer=None)),
    "outputs of another word": call("return_outputs='all'", "'all_ranks'",
        lambda run: run.pipeline(return_outputs="all"), lambda run: run.pipeline(return_outputs="all_ranks")),
    "the user's optimizer": call("takes the optimizer that booster.boost returned", "not the one",
        lambda run: run.pipeline(optimizer=run.optimizer.inner)),
    "the user's model": call("takes the model", "that booster.boost returned",
        lambda run: run.pipeline(model=run.model.unwrap())),
    "backward of a pipeline's loss": call("has computed the gradients already", "call optimizer.step() next",
        lambda run: run.pipeline()["loss"].backward()),
    "backward under stages": call("under a pipeline (pp_size=2)", "Call booster.execute_pipeline",
        lambda run: run.backward(), **PP2),
    "a plain backward under stages": call("no rank has the full model", "Call booster.execute_pipeline",
        lambda run: run.model(**run.batch), **PP2),
    "backward of a number": call("takes a loss tensor", "not a float", lambda run: run.backward(1.0),
        lambda run: run.backward()),
    "backward of a detached loss": call("a loss without a graph", "from the outputs of model(**batch)",
        lambda run: run.backward(run.model(**run.batch).loss.detach()), lambda run: run.backward()),
    "boost twice": call("the model is already boosted", "the plain transformers model, once",
        lambda run: run.booster.boost(run.model, make_optimizer(run.model))),
    "a copy of the model": call("cannot be copied or pickled", "call booster.save_model",
        lambda run: copy.deepcopy(run.model)),
    "a pipeline under FSDP": call("TorchFSDPPlugin has no pipeline", "booster.backward(loss, optimizer)",
        lambda run: run.pipeline(), plugin=TorchFSDPPlugin),
    "a pipeline under DDP": call("TorchDDPPlugin has no pipeline", "booster.backward(loss, optimizer)",
        lambda run: run.pipeline(), plugin=TorchDDPPlugin),
    "torch's clipping": call("were written to between backward and step", "optimizer.clip_grad_by_norm(max_norm)",
        lambda run: clip(run, lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)),
        lambda run: clip(run, lambda run: run.optimizer.clip_grad_by_norm(1.0)), zero_stage=1),
    "a device of Booster": call("device='cpu'", "leave it out", lambda run: Booster(plugin=run.booster.plugin,
        device="cpu")),
    "a plugin by its name": call("plugin='hybrid'", "create one first", lambda run: Booster(plugin="hybrid")),
    "mixed_precision of another plugin": call("is for TorchDDPPlugin", "precision='bf16' instead",
        lambda run: Booster(plugin=run.booster.plugin, mixed_precision="bf16")),
    "an unknown precision of Booster": call("mixed_precision='int8'", "use one of fp32, bf16",
        lambda run: Booster(mixed_precision="int8"), lambda run: Booster(mixed_precision="bf16")),
    "criterion by its name": criterion("criterion='mean'", "give a function of (outputs, inputs)", "mean"),
    "criterion without a loss": criterion("must return a real scalar tensor", "not NoneType", lambda *_: None),
    "criterion of logits": criterion("must return a real scalar tensor", "not a tensor of shape", lambda outputs,
        _: outputs.logits),
    "criterion of a detached loss": criterion("has no graph", "without detach()", lambda outputs,
        _: outputs.loss.detach()),
    "a negative weight": criterion("the weight -1", "a finite number of at least 0", lambda outputs, _: (outputs.loss,
        -1), lambda outputs, _: (outputs.loss, 1)),
    "a weight that is a word": criterion("or (loss_sum, weight)", "str)", lambda outputs, _: (outputs.loss, "a"),
        lambda outputs, _: (outputs.loss, 1)),
    "a weight with a graph": criterion("weight has a graph", "detach it", lambda outputs, _: (outputs.loss,
        outputs.loss), lambda outputs, _: (outputs.loss, outputs.loss.detach())),
    "no labels": batch("contain no loss", "give labels in the batch", without("labels")),
    "a divisor of zero": batch("num_items_in_batch=0", "the number of labels in the global batch", dividing(0),
        dividing(40)),
    "a divisor that is a word": batch("num_items_in_batch='a'", "a number above 0", dividing("a"), dividing(40)),
    "a vector of divisors": batch("num_items_in_batch=tensor([5])", "or a 0-d tensor", dividing(torch.tensor([5])),
        dividing(torch.tensor(40))),
    "unequal samples": batch("equally long", "labels has 2", lambda x: x | {"labels": x["labels"][:2]}),
    "a weight that is not a number": criterion("the weight nan", "a finite number", lambda o, _: (o.loss,
        float("nan"))),
    "a weight in a list": criterion("or (loss_sum, weight)", "list)", lambda o, _: (o.loss, [1.0]), lambda o,
        _: (o.loss, 1.0)),
    "weights of some microbatches": criterion("a weight for some microbatches only", "the criterion", weighing_once),
    "a criterion that stops": criterion("raised StopIteration", "the criterion", lambda *_: next(iter([]))),
    "outputs that are no dictionary": batch("contain no loss", "without return_dict=False",
        lambda x: x | {"return_dict": False}),
    "no_sync of the user's optimizer": call("booster.no_sync takes the optimizer", "booster.boost returned",
        lambda run: run.booster.no_sync(run.model, run.optimizer.inner)),
    "no_sync of the user's model": call("no_sync takes the model", "booster.boost returned",
        lambda run: run.booster.no_sync(run.model.unwrap(), run.optimizer)),
    "a copy of the optimizer": call("cannot be copied", "booster.save_optimizer",
        lambda run: copy.deepcopy(run.optimizer)),
    "saving the user's model": call("takes the model", "booster.boost returned",
        lambda run: run.booster.save_model(run.model.unwrap(), "never")),
    "an optimizer that stepped under FSDP": model("AdamW already has state",
        "boost a new optimizer before its first step", {"optimizer": stepped, "plugin": TorchFSDPPlugin},
        {"optimizer": make_optimizer}),
    "Rprop under FSDP": model("Rprop assigns to entries", "HybridParallelPlugin or TorchDDPPlugin",
        {"optimizer": lambda m: torch.optim.Rprop(m.parameters()), "plugin": TorchFSDPPlugin},
        {"plugin": TorchDDPPlugin}),
    "another optimizer's backward under FSDP": call("booster.backward takes the optimizer", "booster.boost returned",
        lambda run: run.backward(optimizer=make_optimizer(LLAMA.build())), plugin=TorchFSDPPlugin),
    "boost twice under FSDP": call("already boosted", "once", lambda run: run.booster.boost(run.model),
        plugin=TorchFSDPPlugin),
    "boost with a boosted optimizer": call("the optimizer is already boosted", "the plain torch optimizer",
        lambda run: run.booster.boost(LLAMA.build(), run.optimizer), plugin=TorchFSDPPlugin),
}
# fmt: on
MISUSES = {**OPTIONS, **MODELS, **CALLS}
