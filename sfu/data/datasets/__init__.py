"""One file a dataset. Each offers ``load(config, seed)`` and ``source_files(config)``.

``load`` returns :class:`RawArrays`; ``source_files`` lists the files it reads, which are sealed while a source-free
method runs. A new dataset is one file here and one yaml in ``configs/dataset``.
"""
