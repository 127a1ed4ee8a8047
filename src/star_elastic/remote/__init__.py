"""Models of the Hugging Face hub, of which only those bytes are fetched that a slice is made of.

``open_hub`` makes a folder that looks like the model's: small files are downloaded, weight files have their full length and their
real header, and everything behind the header is a hole until somebody asks for it. So whatever reads a local folder reads
this one, with the same checks.

``huggingface_hub`` says where files lie, with which token and through which client they are asked for. Its file system is not
used for reading: it takes any answer to a range request for the range, and holds it in memory as a whole.
"""

from star_elastic.remote.hub import HubModel, RemoteFile, find_model
from star_elastic.remote.mirror import HubMirror, open_hub

__all__ = ["HubMirror", "HubModel", "RemoteFile", "find_model", "open_hub"]
