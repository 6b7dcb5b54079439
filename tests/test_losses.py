import torch

from dlmi.losses import cross_entropy, target_mask


def test_cross_entropy_by_hand_with_rows_of_different_lengths():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target_ids = torch.tensor([[1, 2, 3], [4, 0, 0]])
    mask = target_mask(torch.tensor([3, 1]), 3)
    log_p = logits - logits.exp().sum(-1, keepdim=True).log()
    expected = [
        -(log_p[0, 0, 1] + log_p[0, 1, 2] + log_p[0, 2, 3]) / 3,
        -log_p[1, 0, 4],
    ]
    torch.testing.assert_close(cross_entropy(logits, target_ids, mask), torch.stack(expected))
