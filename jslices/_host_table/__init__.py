"""Tables that are larger than the memory of a device: in the memory of the host, or a file.

A row and what the optimizer keeps for it are one record (``layout.py``), records are in
memory or in a file (``records.py``), and those of a batch go to the device and come back
(``table.py``).
"""
