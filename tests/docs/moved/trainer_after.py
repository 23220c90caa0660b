import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from echelon import Trainer

texts = (torch.arange(32).unsqueeze(1) + torch.arange(16)) % 100
data = [dict(input_ids=text, labels=text) for text in texts]
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))
args = TrainingArguments("output", per_device_train_batch_size=8, use_cpu=True, report_to="none")
trainer = Trainer(model, args, train_dataset=data, plugin=dict(pp_size=2, num_microbatches=4))
trainer.train()
trainer.save_model()
