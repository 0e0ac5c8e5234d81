// Apart from the page: its policy lets no script stand in it.
window.ui = SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  presets: [SwaggerUIBundle.presets.apis, SwaggerUIBundle.SwaggerUIStandalonePreset],
  layout: "BaseLayout",
  // Else the page's own validator would be asked about the document.
  validatorUrl: null,
});
