"""What models of transformers hand to any attention of its interface besides what that is about."""

# What the mask says too, and what is not about attention.
BESIDES = frozenset(
    (
        *("sliding_window", "position_ids", "cache_position", "use_cache"),
        *("output_router_logits", "output_hidden_states", "return_dict"),
        *("num_items_in_batch", "shift_labels"),  # of the loss
    )
)
