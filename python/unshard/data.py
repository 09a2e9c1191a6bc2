"""Loaders that give each rank its own part of a data set."""
import torch
from torch.utils.data import DataLoader, DistributedSampler


class EngineDataLoader:
    """Micro-batches of this rank; iterate as often as you like. `data_sampler.set_epoch(n)` shuffles anew."""

    def __init__(self, dataset, batch_size, data_sampler, collate_fn=None, num_workers=0, pin_memory=False, drop_last=False):
        self.dataset, self.batch_size, self.data_sampler = dataset, batch_size, data_sampler
        self.dataloader = DataLoader(dataset, batch_size=batch_size, sampler=data_sampler, collate_fn=collate_fn,
                                     num_workers=num_workers, pin_memory=pin_memory, drop_last=drop_last)

    def __iter__(self):
        return iter(self.dataloader)

    def __len__(self):
        return len(self.dataloader)


def engine_loader(dataset, batch_size, world_size, rank, data_sampler=None, collate_fn=None, num_workers=None, pin_memory=False,
                  drop_last=False, shuffle=True):
    """The loader of `initialize(training_data=...)`: a DistributedSampler unless the data set has no length or a sampler is given."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        data_sampler = None
    elif data_sampler is None:
        data_sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
    return EngineDataLoader(dataset, batch_size, data_sampler, collate_fn, num_workers or 0, pin_memory and torch.cuda.is_available(),
                            drop_last)


class RepeatingLoader:
    """Starts a loader again when it ends, for ever."""

    def __init__(self, loader):
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)

    def __len__(self):
        return len(self.loader)
