"""Published codecs behind the protocol `audiollm.codec.Codec`: EnCodec, DAC and Mimi.

Each is loaded from a local folder, or gets random weights from its Hugging Face config; nothing is downloaded.
Each runs a clip in one piece, as its own package does, so memory grows with the length: cut recordings
of more than some minutes before encoding. The modules are imported by name, since each brings a large package.
"""
