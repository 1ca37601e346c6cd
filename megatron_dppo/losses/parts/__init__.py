"""The functions that losses share. They load torch; the files of the losses do not, see ``config.loss_registry``."""
