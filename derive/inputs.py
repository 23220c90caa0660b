"""Synthetic batches of any model, from the signature of its forward and its config. Imports nothing of Echelon.

An argument is made by its name. If a forward lacks something or has too much of it (tokens at which an image's features
belong, frames of a video, the order of an audio's dimensions), its error says so, and `Inputs.adapt` changes the
arguments accordingly.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

LENGTH, TARGETS = 16, 8  # tokens
_WIDTH = 64  # of a small text model: errors may count features in numbers
# B samples, S tokens, F frequencies, T times
_TEXT = ("CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
_CLASSES = ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION",
            "AUDIO_XVECTOR", "NEXT_SENTENCE_PREDICTION")  # fmt: skip
_OBJECTS = ("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "INSTANCE_SEGMENTATION", "IMAGE_SEGMENTATION")
_VISION = (
    "vision_config",
    "image_config",
    "vit_config",
    "backbone_config",
    "vision_encoder_config",
    "encoder",
)
_AUDIO = ("audio_config", "audio_encoder_config", "encoder_config", "encoder")
_MODALITIES = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "input_features",
               "input_features_mask", "feature_attention_mask", "pixel_values_videos")  # fmt: skip
_FEATURE_MASKS = ("input_features_mask", "feature_attention_mask")
# Attributes of `Inputs` that answer an error.
_ANSWERS = ("num_placeholders", "image_size", "frames", "left_out", "is_transposed", "is_stacked", "ends_rows",
            "grid_side", "wave_length", "length")  # fmt: skip
_GRIDS = ("image_grid_thw", "grid_thw", "image_grid_hws")


class Inputs:
    """Arguments of a model's forward.

    Args:
        model: the model, small.
        kind: its task, by the name of transformers' mapping ("CAUSAL_LM"); it decides the form of the labels.
        length, target_length: tokens of a text, and of a decoder's text.
    """

    def __init__(self, model: Any, kind: str, *, length: int = LENGTH, target_length: int = TARGETS) -> None:
        self.config, self.kind, self.length, self.target_length = model.config, kind, length, target_length
        self.text = self.config.get_text_config()
        self.names = inspect.signature(model.forward).parameters
        self.vision = _inner(_inner(self.config, "vlm_config"), *_VISION)
        self.audio = _inner(self.config, *_AUDIO)
        # Of a config that does not name its vocabulary, tokens that every embedding has.
        embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
        self.smallest_table = min((module.num_embeddings for module in embeddings), default=256)
        self.generator = torch.Generator()
        self.samples = 0  # set by `make`
        # Answers to errors, which `adapt` changes, and `adopt` takes over:
        self.num_placeholders: dict[int, int] = {}  # in each row, by placeholder token
        self.image_size: tuple[int, int] | None = None  # height and width; None takes the config's
        self.frames = 0  # of each sample, as a dimension of images; 0 leaves the dimension out
        self.left_out: set[str] = set()  # names of arguments
        self.is_transposed = False  # spectrograms are (B, F, T) instead of (B, T, F)
        self.is_stacked = False  # time series are one tensor instead of a list
        self.ends_rows = False  # the last token of a text is that of its end
        self.grid_side = 2  # of an image in a grid of patches, in tokens
        self.wave_length = 4000  # of a waveform
        self.most_placeholders = 600  # in a row; more are no answer
        self._tried: set[str] = set()  # names of answers that were given

    def make(self, samples: int = 2, seed: int = 0) -> dict[str, Any]:
        """Return the arguments; equal for equal samples and seed, unless an error was answered in between."""
        self.samples = samples
        self.generator.manual_seed(seed)
        inputs = self._images() | self._sounds() | self._texts() | self._series() | self._others()
        inputs = {name: value for name, value in inputs.items() if name not in self.left_out}
        return inputs | self._labels(inputs)

    def adopt(self, other: "Inputs") -> None:
        """Take over the answers to errors that other inputs gave."""
        for name in _ANSWERS:
            setattr(self, name, copy(getattr(other, name)))

    def adapt(self, error: Exception, *, leaves_out: bool = True) -> bool:
        """Change what `make` returns, as an error of the forward asks for; return False if nothing is left to try.

        Args:
            error: of the forward.
            leaves_out: leave out images and sounds if nothing else helps.
        """
        text = f"{type(error).__name__}: {error}"
        # A named answer is given once. The unnamed one notes in `_tried` the counts of placeholders that it gave.
        answers: tuple[tuple[str, Callable[[], bool]], ...] = (
            ("", lambda: self._fill_placeholders(text)),
            ("side", lambda: self._resize(text)),
            ("end", lambda: self._end_rows(text)),
            *(
                (f"frames {count}", lambda count=count: self._add_frames(text, count))
                for count in (1, 2, 3, 5)
            ),
            ("all frames", self._take_all_frames),
            ("waves", lambda: self._lengthen_waves(text)),
            ("transposed", self._transpose),
            ("stacked", self._stack),
            ("sizes", self._leave_out_sizes),
            *([("text alone", self._leave_out_modalities)] if leaves_out else []),
        )
        for name, answer in answers:
            if name not in self._tried and answer():
                self._tried |= {name} - {""}
                return True
        return False

    # Inputs

    def _images(self) -> dict[str, Any]:
        """Return images, patches of images, or videos, and their sizes: (B, channels, height, width) by default."""
        channels, height, width = self._image()
        if "pixel_values" not in self.names:
            if "pixel_values_videos" not in self.names:
                return {}
            frames = min(_first(self.vision, "num_frames", "frames_per_clip", default=4), 16)
            return {"pixel_values_videos": self._floats(self.samples, frames, channels, height, width)}
        if grid := next((name for name in _GRIDS if name in self.names), None):
            merge = _one(_first(self.vision, "spatial_merge_size", "merge_size", default=2))
            patch = _one(_first(self.vision, "patch_size", default=8))
            times = _one(_first(self.vision, "temporal_patch_size", "patch_temporal", default=1))
            size = channels * times * patch**2
            side = self.grid_side * merge
            pixels = self._floats(self.samples * side**2, size)
            sides = [[1, side, side]] if grid != "image_grid_hws" else [[side, side]]
            return {"pixel_values": pixels, grid: torch.tensor(sides * self.samples)}
        frames = (self.frames,) if self.frames else ()
        if self.kind == "VIDEO_CLASSIFICATION":
            frames = (_first(self.config, "num_frames", default=2),)
        inputs: dict[str, Any] = {
            "pixel_values": self._floats(self.samples, *frames, channels, height, width)
        }
        if "image_sizes" in self.names:
            inputs["image_sizes"] = torch.tensor([[height, width]] * self.samples)
        masked = self.names.get("bool_masked_pos")
        if masked is not None and masked.default is masked.empty:  # every other patch of an image or a video
            patch = _one(self.config.patch_size)
            times = max(self.frames, 1) // getattr(self.config, "tubelet_size", 1)
            patches = torch.arange(times * (height // patch) * (width // patch))
            inputs["bool_masked_pos"] = (patches % 2 == 0).expand(self.samples, -1).clone()
        return inputs

    def _sounds(self) -> dict[str, Any]:
        """Return spectrograms (B, T, F), or (B, F, T) once transposed, with masks (B, T), or waveforms (B, T)."""
        inputs: dict[str, Any] = {}
        if "input_features" in self.names:
            bins = _one(_first(self.audio, "input_size", "num_mel_bins", "n_mels", "num_mels", "feature_size",
                               "input_feat_per_channel", "input_dim", "feature_projection_input_dim",
                               default=16))  # fmt: skip
            # Whisper takes exactly twice as many frames as positions; Speech2Text any number up to its limit.
            positions = getattr(self.audio, "max_source_positions", None)
            times = (
                128 if positions is None or hasattr(self.audio, "input_feat_per_channel") else 2 * positions
            )
            shape = (bins, times) if self.is_transposed else (times, bins)
            inputs["input_features"] = self._floats(self.samples, *shape)
            masks = [name for name in _FEATURE_MASKS if name in self.names]
            if "attention_mask" in self.names and "input_ids" not in self.names:
                masks.append("attention_mask")
            inputs |= {name: torch.ones(self.samples, times, dtype=torch.long) for name in masks}
        if "input_values" in self.names and "input_ids" not in self.names and not inputs:
            is_spectrogram = hasattr(self.config, "num_mel_bins") and hasattr(self.config, "max_length")
            sides = (
                (self.config.max_length, self.config.num_mel_bins) if is_spectrogram else (self.wave_length,)
            )
            inputs["input_values"] = self._floats(self.samples, *sides)
        return inputs

    def _texts(self) -> dict[str, Any]:
        """Return token ids (B, S), and the masks, token types and boxes of layouts that the forward takes with them.

        A task of choices has (B, 2, S): a text, and its tokens backwards.
        """
        inputs: dict[str, Any] = {}
        if "input_ids" in self.names:
            inputs["input_ids"] = ids = self._ids()
            marks = torch.isin(ids, torch.tensor([*self.num_placeholders], dtype=torch.long)).long()
            if "attention_mask" in self.names:
                inputs["attention_mask"] = torch.ones_like(ids)
            if "mm_token_type_ids" in self.names:
                inputs["mm_token_type_ids"] = marks
            elif "token_type_ids" in self.names and self.num_placeholders:
                inputs["token_type_ids"] = marks
            if "bbox" in self.names:
                inputs["bbox"] = (
                    self._floats(self.samples, self.length, 8)
                    if _is_relative(self.config)
                    else (torch.zeros(self.samples, self.length, 4, dtype=torch.long))
                )
        if "qformer_input_ids" in self.names:
            inputs["qformer_input_ids"] = self._ids(placeholders=False)
        if self.kind == "MULTIPLE_CHOICE":
            return {name: torch.stack([value, value.flip(1)], 1) for name, value in inputs.items()}
        return inputs

    def _series(self) -> dict[str, Any]:
        """Return the past of time series: (B, T, channels); for TimesFM a list of (T), or (B, T) if `is_stacked`."""
        if "past_values" not in self.names:
            return {}
        length = _first(self.config, "context_length", default=32)
        if "freq" in self.names or "timesfm" in self.config.model_type:
            series = self._floats(self.samples, length)
            inputs: dict[str, Any] = {"past_values": series if self.is_stacked else list(series)}
            if "freq" in self.names:
                inputs["freq"] = [0] * self.samples  # high frequency
            return inputs
        channels = _first(self.config, "num_input_channels", default=1)
        return {"past_values": self._floats(self.samples, length, channels)}

    def _others(self) -> dict[str, Any]:
        """Return the arguments of single model families that the forward takes, and `return_loss`."""
        inputs: dict[str, Any] = {}
        if "input_points" in self.names:
            # SAM: one prompt of two points (x, y) in an image, both in the foreground.
            inputs["input_points"] = 8 * self._floats(self.samples, 1, 2, 2).abs()
            inputs["input_labels"] = torch.ones(self.samples, 1, 2, dtype=torch.long)
        if "flattened_patches" in self.names:
            # Pix2Struct: 4 x 4 patches, each with its row, its column and its RGB pixels.
            patch = _one(_first(self.vision, "patch_size", default=16))
            width = _first(self.vision, "patch_embed_hidden_size", default=3 * patch**2)
            patches = self._floats(self.samples, 16, 2 + width)
            patches[..., 0], patches[..., 1] = torch.arange(16) // 4 + 1, torch.arange(16) % 4 + 1
            inputs["flattened_patches"] = patches
        if "visual_embeds" in self.names and "visual_embedding_dim" in dir(self.config):
            # VisualBERT: 4 regions of an image.
            inputs["visual_embeds"] = self._floats(self.samples, 4, self.config.visual_embedding_dim)
        if "visual_feats" in self.names:
            # LXMERT: 4 regions of an image, and their boxes.
            inputs["visual_feats"] = self._floats(self.samples, 4, self.config.visual_feat_dim)
            inputs["visual_pos"] = self._floats(self.samples, 4, 4).abs()
        if "return_loss" in self.names:
            inputs["return_loss"] = True
        return inputs

    def _labels(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return labels in the form of the task, and the decoder's tokens; none for a task without labels.

        Args:
            inputs: the other arguments; language models are labelled with their own tokens.
        """
        names, kind = self.names, self.kind
        classes = max(2, int(_first(self.config, "num_labels", default=2)))
        if "start_positions" in names and "labels" not in names:
            has_questions = kind == "PRETRAINING" and "question_positions" in names  # two in each text
            shape = [self.samples, 2] if has_questions else [self.samples]
            spans = ["question_positions"] * has_questions + ["start_positions", "end_positions"]
            return {name: self._ints(0, self.length, *shape) for name in spans}
        _, height, width = self._image()
        if "mask_labels" in names:
            masks = [self._ints(0, 2, 2, height, width).float() for _ in range(self.samples)]
            return {
                "mask_labels": masks,
                "class_labels": [self._ints(0, classes, 2) for _ in range(self.samples)],
            }
        targets = {"decoder_input_ids": self._ids(self.target_length)} if "decoder_input_ids" in names else {}
        if "labels" not in names or "mlm_labels" in names:
            return targets
        if kind in _TEXT and "input_ids" in inputs:
            labels = inputs["input_ids"].clone()[:, : self.length if "decoder_input_ids" in names else None]
            for token in self.num_placeholders:
                labels[labels == token] = -100
        elif kind in _CLASSES:
            labels = self._ints(0, classes, self.samples)
        elif kind == "MULTIPLE_CHOICE":
            labels = self._ints(0, 2, self.samples)
        elif kind == "CTC":
            labels = self._ints(3, min(self._vocabulary, 30), self.samples, 4)
        elif "SEQ" in kind or kind in ("RNNT", "TDT", *_TEXT):
            labels = self._ids(placeholders=False)
        elif kind == "TOKEN_CLASSIFICATION":
            labels = self._ints(0, classes, self.samples, self.length)
        elif kind == "VISUAL_QUESTION_ANSWERING" and targets:  # a decoder writes the answer
            labels = targets["decoder_input_ids"]
        elif kind in ("QUESTION_ANSWERING", "VISUAL_QUESTION_ANSWERING"):
            labels = torch.rand(self.samples, classes, generator=self.generator)
        elif kind in _OBJECTS:
            labels = [self._objects(classes, height, width) for _ in range(self.samples)]
        elif kind == "SEMANTIC_SEGMENTATION":
            labels = self._ints(0, classes, self.samples, height, width)
        elif kind == "TEXT_TO_SPECTROGRAM":
            labels = self._floats(self.samples, self.length, self.config.num_mel_bins)
        elif "input_ids" in inputs:
            labels = inputs["input_ids"].clone()
        else:
            return targets
        return {"labels": labels}

    # Values

    def _ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    @property
    def _vocabulary(self) -> int:
        sizes = (_first(config, "vocab_size", "n_vocab", default=None) for config in (self.text, self.config))
        return int(next((size for size in sizes if size), self.smallest_table))

    def _ids(self, length: int | None = None, *, placeholders: bool = True) -> Tensor:
        """Return tokens (B, S), of the upper part of the vocabulary, with the placeholders after the second."""
        top = max(self._vocabulary, 8)
        ids = self._ints(min(100, top // 2), top, self.samples, length or self.length)
        for token in self.num_placeholders:
            ids[ids == token] = 1
        if self.ends_rows and isinstance(end := getattr(self.text, "eos_token_id", None), int):
            ids[ids == end] = 1
            ids[:, -1] = end
        for token, count in self.num_placeholders.items() if placeholders else ():
            ids = torch.cat([ids[:, :2], torch.full((self.samples, count), token), ids[:, 2:]], 1)
        return ids

    def _image(self) -> tuple[int, int, int]:
        """Return channels, height and width of an image."""
        default = _first(self.config, "image_size", default=64)
        size = self.image_size or _first(self.vision, "image_size", "img_size", "input_size", default=default)
        size = (size["height"], size["width"]) if isinstance(size, dict) else size
        height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
        channels = _first(self.vision, "num_channels", "in_channels", "in_chans", default=3)
        return channels if isinstance(channels, int) else 3, height, width

    def _objects(self, classes: int, height: int, width: int) -> dict[str, Tensor]:
        """Return two objects in an image: classes, boxes (x, y, width, height) and masks."""
        boxes = 0.3 * torch.rand(2, 4, generator=self.generator) + 0.3
        masks = self._ints(0, 2, 2, height, width).float()
        return {"class_labels": self._ints(0, classes, 2), "boxes": boxes, "masks": masks}

    # Answers to errors

    def _fill_placeholders(self, text: str) -> bool:
        """Put as many placeholder tokens into each row as there are features of an image or a sound."""
        counts = re.search(r"tokens\D*?(\d+)\D+?features\D*?(\d+)", text, re.S) or re.search(
            r"placeholders?\D*?(\d+)\D+?features\D*?(\d+)", text, re.S
        )
        token = self._placeholder(text)
        if counts is None or token is None:
            return False
        reported, features = int(counts[1]), int(counts[2])
        # Features are counted in rows, in vectors, or in numbers: so many for each placeholder of the batch.
        placeholders = self.num_placeholders.get(token, 0) * self.samples
        per_token = max(1, reported // placeholders) if placeholders else 1
        widths = (per_token, int(_first(self.text, "hidden_size", "d_model", default=_WIDTH)), _WIDTH)
        for count in (features // self.samples // width for width in widths):
            key = f"{count} of {token}"
            if 0 < count <= self.most_placeholders and key not in self._tried:
                self._tried.add(key)
                self.num_placeholders[token] = count
                return True
        return False

    def _placeholder(self, text: str) -> int | None:
        """Return the id of the placeholder token of the modality that an error names, else of images."""
        modality = "audio" if "udio" in text else "video" if "ideo" in text else "image"
        suffixes = ("_token_id", "_token_index", "_token", "_patch_id")
        names = [f"{prefix}{suffix}" for prefix in (modality, "image", "im") for suffix in suffixes]
        configs = (self.config, self.text, _inner(self.config, "vlm_config"))
        ids = [
            getattr(config, name, None)
            for config in configs
            for name in [*names, "media_placeholder_token_id"]
        ]
        return next((token for token in ids if isinstance(token, int)), None)

    def _resize(self, text: str) -> bool:
        """Give images the height and width that an error names as the model's."""
        match = re.search(r"\((\d+)\*(\d+)\) doesn't match model \((\d+)\*(\d+)\)", text)
        self.image_size = (int(match[3]), int(match[4])) if match else self.image_size
        return match is not None

    def _end_rows(self, text: str) -> bool:
        """End every text with the token of its end, of which a classifier takes the state."""
        self.ends_rows = "<eos> token" in text
        return self.ends_rows

    def _add_frames(self, text: str, count: int) -> bool:
        """Give images a dimension of frames before the channels, if an error is about the number of dimensions."""
        asks = (
            r"expected .*5|too many values|not enough values|IndexError|5D|dimension out of range|pixel_values of|"
            r"split_sizes to sum exactly"
        )
        if "pixel_values" not in self.names or not re.search(asks, text):
            return False
        self.frames = count
        return True

    def _take_all_frames(self) -> bool:
        """Give as many frames as the config names, if images have frames but another number of them."""
        tried, self.frames = self.frames, self.frames and getattr(self.config, "num_frames", self.frames)
        return self.frames != tried

    def _lengthen_waves(self, text: str) -> bool:
        """Double the length of waveforms, if a convolution finds them too short."""
        is_short = "input_values" in self.names and "than actual input size" in text
        self.wave_length *= 1 + is_short
        return is_short

    def _transpose(self) -> bool:
        """Give spectrograms with frequencies before times."""
        self.is_transposed = "input_features" in self.names
        return self.is_transposed

    def _stack(self) -> bool:
        """Give time series as one tensor instead of a list."""
        self.is_stacked = "past_values" in self.names
        return self.is_stacked

    def _leave_out_sizes(self) -> bool:
        """Leave out the sizes of images, by which some classes expect a vision model of another kind."""
        self.left_out |= {"image_sizes"}
        return "image_sizes" in self.names

    def _leave_out_modalities(self) -> bool:
        """Leave out images and sounds, and their placeholders."""
        takes_text = "input_ids" in self.names
        modalities = [name for name in _MODALITIES if name in self.names] if takes_text else []
        self.left_out |= set(modalities)
        self.num_placeholders = {}
        return bool(modalities)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for element in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(element)


def loss_of(output: Any) -> Tensor:
    """Return the model's loss, or else the mean square of its first output with gradients.

    Raises:
        ValueError: no output has gradients.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(())
    for tensor in tensors_in(output):
        if tensor.is_floating_point() and tensor.requires_grad:
            return tensor.float().pow(2).mean()
    raise ValueError("no output has gradients")


def still(model: nn.Module) -> nn.Module:
    """Turn dropout off, and return the model in training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def _first(config: Any, *names: str, default: Any) -> Any:
    """Return the first of these settings that is not None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _one(value: Any) -> int:
    return value if isinstance(value, int) else int(value[0])


def _inner(config: Any, *names: str) -> Any:
    """Return the first of these nested configs that there is, or the config itself."""
    return next(
        (inner for name in names if isinstance(inner := getattr(config, name, None), PreTrainedConfig)),
        config,
    )


def _is_relative(config: Any) -> bool:
    """Return True if boxes have coordinates of four corners as fractions."""
    return hasattr(config, "dim_bbox")
