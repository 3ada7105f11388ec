"""One file a dataset. Each offers ``source_files(config)``, and ``load(config, seed)`` or ``images(config)`` or both.

``load`` returns feature rows (:class:`RawArrays`), ``images`` an :class:`ImageSet` for a backbone; ``source_files``
lists the files and folders it reads, which are sealed while a source-free method runs. A new dataset is one file here
and one yaml in ``configs/dataset``.
"""
