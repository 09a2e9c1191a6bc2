"""A linear layer in tiles, each a layer of its own, so that no more than one tile's weight need be whole at a time."""
import itertools

import torch


def _sizes(total, parts, what):
    if not 1 <= parts <= total:
        raise ValueError(f"[TiledLinear] {what}={parts} isn't between 1 and the {total} features")
    return [total // parts + (index < total % parts) for index in range(parts)]


class TiledLinear(torch.nn.Module):
    """y = x W^T + b in in_splits x out_splits tiles.

    Parameters
    ----------
    in_features, out_features, bias :
        As torch.nn.Linear's.
    in_splits, out_splits : int
        Tiles along each side; need not divide the features.
    input_is_already_split : bool
        forward takes the list of inputs, one a tile along the input (the input itself if in_splits is 1).
    combine_out_splits : bool
        False: forward returns the list of outputs, one a tile along the output.
    linear_cls : class
        Of the tiles: linear_cls(in_features, out_features, bias=..., **kwargs).
    init_linear : torch.nn.Linear, optional
        Weights are copied from it.
    """

    def __init__(self, in_features, out_features, bias=True, in_splits=1, out_splits=1, input_is_already_split=False,
                 combine_out_splits=True, linear_cls=torch.nn.Linear, init_linear=None, **kwargs):
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self._in_sizes = _sizes(in_features, in_splits, "in_splits")
        self._out_sizes = _sizes(out_features, out_splits, "out_splits")
        self.in_parts, self.out_parts = ([0, *itertools.accumulate(sizes)] for sizes in (self._in_sizes, self._out_sizes))
        # The bias is added once: by the last tile of each row, where DeepSpeed's checkpoints have it.
        self.linears = torch.nn.ModuleList(
            torch.nn.ModuleList(linear_cls(size_in, size_out, bias=bias and column == in_splits - 1, **kwargs)
                                for column, size_in in enumerate(self._in_sizes))
            for size_out in self._out_sizes)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_):
        """[..., in_features] -> [..., out_features]"""
        if self.in_splits == 1 and isinstance(input_, torch.Tensor):
            inputs = [input_]
        else:
            inputs = list(input_) if self.input_is_already_split else torch.split(input_, self._in_sizes, dim=-1)
        if len(inputs) != self.in_splits:
            raise ValueError(f"[TiledLinear] the input has {len(inputs)} parts, in_splits is {self.in_splits}")
        outputs = []
        for row in self.linears:
            total = None
            for part, tile in zip(inputs, row):
                total = self._reduce(total, tile(part))
            outputs.append(total)
        return self._combined(outputs)

    def _reduce(self, total, new):
        return new if total is None else total + new

    def _combined(self, outputs):
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other):
        """Take the weights of a torch.nn.Linear of the same sizes, partitioned or not."""
        if tuple(other.weight.shape) != (self.out_features, self.in_features) or (other.bias is not None) != self.use_bias:
            raise ValueError(f"[TiledLinear.copy_params_from] a layer of {self.in_features} -> {self.out_features} features, bias="
                             f"{self.use_bias}, is needed; got weight {list(other.weight.shape)}, bias={other.bias is not None}")
        for row, weight in zip(self.linears, torch.split(other.weight, self._out_sizes, dim=0)):
            for tile, part in zip(row, torch.split(weight, self._in_sizes, dim=1)):
                tile.weight.copy_(part)
        if self.use_bias:
            for row, part in zip(self.linears, torch.split(other.bias, self._out_sizes)):
                row[-1].bias.copy_(part)


class TiledLinearReturnBias(TiledLinear):
    """The same of layers whose forward returns (output, bias): returns both, summed and joined; without combine_out_splits one
    pair a row of tiles."""

    def _reduce(self, total, new):
        if total is None:
            return new
        return total[0] + new[0], new[1] if new[1] is not None else total[1]

    def _combined(self, outputs):
        if not self.combine_out_splits:
            return outputs
        biases = [bias for _, bias in outputs if bias is not None]
        return torch.cat([value for value, _ in outputs], dim=-1), torch.cat(biases, dim=-1) if biases else None
