"""The bus as a Spark data source and sink; Spark session and Java."""
